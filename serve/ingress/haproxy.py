"""What is changed in the file that Ray Serve writes for HAProxy, before HAProxy reads it.

Ray starts HAProxy anew at every change of replicas, by the executable that RAY_SERVE_HAPROXY_BINARY_PATH names: ours,
`supervisor`, which hands a changed copy of the file to HAProxy, and refuses one that it does not know.
"""

import re
from dataclasses import dataclass
from pathlib import Path

PATIENCE_S = 2
"""Seconds after a request's deadline for which the only replica may still answer a health check."""
PAGES = (500, 502, 503, 504)
"""Errors that HAProxy answers by a file, `<status>.http`. Its 400 and 408, of what is no request yet, are its own."""
COUNTED = (503, 504)
"""The statuses of those answers, by which HAProxy counts them since it has begun; it tells replicas that are asked for
their metrics, in the header ERRORS, e.g. `503=12 504=0`."""
ERRORS = "x-haproxy-errors"
LATER = "%[var(txn.later)]"
"""The seconds after which to come again, in what HAProxy answers where the replicas are full."""
TOLD_S = 10
"""Seconds for which it counts what a replica has said last."""
MOST_LOOKS = 2
"""All requests that a replica has at a time are this many times the questions that it takes."""
BUSY, BUSY_V2, DOWN_V2 = "busy.json", "busy-v2.json", "down-v2.json"
"""The files that answer, with status 503, what is more than the replicas take, and where none is up. Those of `/v2`
have its form of an error, which its clients read; a file by a status alone, of `PAGES`, has one form for all paths."""

SECURITY_HEADERS = {
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""On every answer: it is nobody's to store, to embed or to take for another type."""
CONTENT_POLICY = "content-security-policy"
NO_CONTENT = "default-src 'none'; frame-ancestors 'none'"
"""The content security policy of answers that are no page."""
ONLY_TLS = "max-age=31536000"


class UnknownFile(ValueError):
    """The file lacks a line that is to be changed, or opens what nobody has closed."""


@dataclass(frozen=True)
class Front:
    """What clients meet, where Ray has no setting of its own."""

    host: str
    """Address to listen on, as HAProxy writes it (`bound`)."""
    header_s: int
    """Seconds in which the header of a request has to arrive."""
    body_s: int
    """Seconds in which its body has to, or as much of it as a buffer of HAProxy's holds (15 kB): until the deadline."""
    pages: str
    """Folder of the files that answer errors."""
    most: int
    """Questions (POST) that a replica takes at a time."""
    certificate: str = ""
    """File of the certificate, where clients are to encrypt; its key lies beside it (`key_of`)."""


def key_of(certificate: Path) -> Path:
    """Where HAProxy looks for the key of a certificate that stands in a file of its own (ssl-load-extra-files)."""
    return certificate.with_name(f"{certificate.name}.key")


def bound(host: str) -> str:
    """The address as HAProxy writes it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def rewrite(text: str, front: Front, socket: Path) -> str:
    """Ray's file, closed: no page of statistics or metrics on a port, an admin socket of the owner's alone at the path
    `socket`, no log on the syslog port, no list of routes, the address that was asked for, a time-out for headers, our
    own errors, and no more requests for the replicas than they take. The only replica has more time for a health check.

    Raises `UnknownFile` where a line that is to be changed does not stand there exactly once, and where anything but
    the endpoint would listen afterwards, or stand in for replicas.
    """
    errors = "\n".join(f"    errorfile {status} {front.pages}/{status}.http" for status in PAGES)
    # Browsers open connections that they may never use; without the option each would be answered 408.
    # HAProxy can give to another replica only what it had whole before it gave it to the first.
    tls = f" ssl crt {front.certificate} alpn http/1.1 ssl-min-ver TLSv1.2" if front.certificate else ""
    body = [
        f"http-request wait-for-body time {front.body_s}s if METH_POST",
        # A replica's parser would take its head for the whole request, and the body for others' requests.
        "http-request del-header upgrade",
    ]
    address = "\n    ".join([rf"\g<1>{front.host}:\2{tls}", *body, *_secured(front)])
    header = f"    timeout http-request {front.header_s}s\n    option http-ignore-probes"
    changes = {
        "the log on the syslog port": (r"^    log \S+ local0 info\n", ""),
        "the admin socket": (
            r"^(    stats socket )\S+( mode )666( level admin expose-fd listeners)$",
            rf"\g<1>{socket}\g<2>600\3",
        ),
        "the clients' time-out": (r"^    timeout client \d+s$", rf"\g<0>\n{header}"),
        "the errors": (r"^    errorfile 502 .*\n    errorfile 503 .*\n    errorfile 504 .*$", errors),
        "the port of metrics": (r"^frontend prometheus\n    bind :\d+\n(?:    .*\n)*", ""),
        "the port of statistics": (r"^listen stats\n  bind \*:\d+\n(?:  .*\n)*", ""),
        # Ray tells whoever asks the names of the applications. A replica answers that path as any other.
        "the list of routes": (r"^    http-request return .* if routes\n", ""),
        "the answer where nothing is served": (
            r"^(backend default_backend\n)    http-request return .*$",
            r"\g<1>    http-request deny deny_status 503",
        ),
        "the address": (r"^(frontend http_frontend\n    bind )\S+:(\d+)$", address),
    }
    for name, (pattern, line) in changes.items():
        text, count = re.subn(pattern, line, text, flags=re.MULTILINE)
        if count != 1:
            raise UnknownFile(f"Ray Serve's file for HAProxy has {name} {count} times in the form that rtrain knows")
    # There only where gRPC is on.
    grpc = r"^(frontend grpc_frontend\n(?:    #.*\n)*    bind )\S+:(\d+ proto h2)$"
    text = re.sub(grpc, rf"\g<1>{front.host}:\2", text, flags=re.MULTILINE)
    if re.search(r"^\s*server\s.*\sbackup\b", text, re.MULTILINE):
        raise UnknownFile("Ray Serve's file for HAProxy has a server beside the replicas that rtrain does not know")
    text = re.sub(r"^backend .*\n(?:    .*\n?)*", lambda found: _own(found[0], front), text, flags=re.MULTILINE)
    opened = re.findall(r"^\s*bind\s+(.*)$", text, re.MULTILINE)
    known = rf"{re.escape(front.host)}:\d+(?: proto h2|{re.escape(tls)})?"
    others = [one for one in opened if not re.fullmatch(known, one)]
    if others:
        raise UnknownFile(f"Ray Serve's file for HAProxy opens {', '.join(others)}, which rtrain does not know")
    return text


def _own(backend: str, front: Front) -> str:
    """A backend of replicas with our lines; any other one as it is."""
    if not names_servers(backend):
        return backend
    first, rest = backend.split("\n", 1)
    patient = list[str]()
    if len(re.findall(r"^    server ", rest, re.MULTILINE)) == 1:
        # There is none to go to in its place. A process that loads a model, or has no processor, lacks the time for a
        # check and answers requests late; one that has died refuses connections, for which no check has to wait.
        patient = [f"timeout check {front.body_s + PATIENCE_S}s"]
    return "\n".join([first, *(f"    {line}" for line in (*patient, *_counted(), *_limited(front))), rest])


def _counted() -> list[str]:
    """What HAProxy answers itself is counted, in a table of one row: no replica knows of it."""
    told = " ".join(f"{status}=%[sc_get_gpc({place},0)]" for place, status in enumerate(COUNTED))
    return [
        f"stick-table type integer size 1 store gpc({len(COUNTED)})",
        "http-request track-sc0 int(1)",
        f"http-request del-header {ERRORS}",  # a client's
        f'http-request set-header {ERRORS} "{told}" if {{ path /metrics }}',
        "http-response set-var(txn.theirs) bool(true)",
        *(
            f"http-after-response sc-inc-gpc({place},0) if {{ status {status} }} !{{ var(txn.theirs) -m found }}"
            for place, status in enumerate(COUNTED)
        ),
    ]


def _secured(front: Front) -> list[str]:
    """What HAProxy answers itself has the headers that the replicas' answers have."""
    return [
        f'http-after-response set-header {name} "{value}" if !{{ var(txn.theirs) -m found }}'
        for name, value in security_headers(bool(front.certificate)).items()
    ]


def security_headers(tls: bool) -> dict[str, str]:
    """Those of an answer that is no page; `tls`: clients encrypt."""
    more = {"strict-transport-security": ONLY_TLS} if tls else {}
    return {**SECURITY_HEADERS, **more, CONTENT_POLICY: NO_CONTENT}


def _limited(front: Front) -> list[str]:
    """503 where the replicas have all that they take. They would say so themselves, each time for some of the time that
    an answer takes; and where more connections come at once than a replica's socket holds, one fails, by which HAProxy
    takes the replica for gone: then nobody is answered. Who only looks, at metrics or the page, is answered by one that
    is full of questions (`MOST_LOOKS`), and who asks whether it is well always is."""
    headers = f"hdr retry-after {LATER} hdr x-request-id %[uuid]"
    body = f"status 503 content-type application/json lf-file {front.pages}"
    pages = ((DOWN_V2, "!up v2"), (BUSY, "up full !v2"), (BUSY_V2, "up full v2 !health"))
    answers = [f"http-request return {body}/{page} {headers} if {which}" for page, which in pages]
    return [
        f"http-request set-var(txn.most) nbsrv,mul({front.most})",
        f"http-request set-var(txn.most) nbsrv,mul({MOST_LOOKS * front.most}) unless METH_POST",
        # When to come again the replicas know, who see what waits and how fast it is answered.
        "http-response set-var(proc.later) res.hdr(retry-after) if { status 503 } { res.hdr(retry-after) -m found }",
        "http-response set-var(proc.told) date if { status 503 } { res.hdr(retry-after) -m found }",
        "http-request set-var(txn.later) str(1)",
        f"http-request set-var(txn.later) var(proc.later) if {{ date,sub(proc.told) lt {TOLD_S} }}",
        "acl full be_conn,sub(txn.most) gt 0",
        "acl up nbsrv gt 0",
        "acl v2 path_reg '^(/models/[^/]+)?/v2(/|$)'",
        "acl health path_reg '^(/models/[^/]+)?/v2/health/'",
        *answers,
    ]


def admin_socket(text: str) -> Path:
    """The socket on which Ray asks, by its file, which `rewrite` knows."""
    return Path(re.findall(r"^    stats socket (\S+)", text, re.MULTILINE)[0])


def names_servers(text: str) -> bool:
    """Whether a file names a replica."""
    return re.search(r"^\s*server\s", text, re.MULTILINE) is not None
