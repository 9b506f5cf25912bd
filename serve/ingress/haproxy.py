"""Changes to the configuration that Ray Serve writes for HAProxy, before HAProxy reads it.

Ray starts a new HAProxy at every change of replicas, with the executable named by RAY_SERVE_HAPROXY_BINARY_PATH. Ours,
`supervisor`, passes a changed copy of the configuration to HAProxy, and refuses an unknown configuration.
"""

import re
from dataclasses import dataclass
from pathlib import Path

CHECK_MARGIN_S = 2
"""Seconds after a request's deadline for which the only replica may still answer a health check."""
ERROR_PAGE_STATUSES = (500, 502, 503, 504)
"""Errors that HAProxy answers with a file, `<status>.http`. Its 400 and 408 for incomplete requests keep HAProxy's own
pages."""
COUNTED_STATUSES = (503, 504)
"""Statuses of these answers that HAProxy counts. It sends the counts in `PROXY_ERRORS_HEADER` to a replica whose
metrics are requested, e.g. `503=12 504=0`."""
PROXY_ERRORS_HEADER = "x-haproxy-errors"
RETRY_AFTER_VAR = "%[var(txn.retry_after)]"
"""The seconds after which to come again, in what HAProxy answers where the replicas are full."""
RETRY_AFTER_TTL_S = 10
"""Seconds for which HAProxy repeats the last Retry-After of a replica."""
READ_REQUEST_FACTOR = 2
"""Limit of concurrent requests of a replica, as a multiple of its limit of inference requests (POST)."""
BUSY_PAGE, BUSY_PAGE_V2, DOWN_PAGE_V2 = "busy.json", "busy-v2.json", "down-v2.json"
"""Files for status 503: replicas full, and no replica up. Those of `/v2` have the error form of the Open Inference
Protocol. A file chosen by status alone (`ERROR_PAGE_STATUSES`) has one form for all paths."""

SECURITY_HEADERS = {
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""On every reply: no storing, no embedding, no guessing of the content type."""
CONTENT_POLICY_HEADER = "content-security-policy"
NON_PAGE_CONTENT_POLICY = "default-src 'none'; frame-ancestors 'none'"
"""The content security policy of answers that are no page."""
HSTS_VALUE = "max-age=31536000"


class UnknownHAProxyConfig(ValueError):
    """The file lacks a line that is to be changed, or opens what nobody has closed."""


@dataclass(frozen=True)
class HAProxyOptions:
    """What clients meet, where Ray has no setting of its own."""

    host: str
    """Address to listen on, as HAProxy writes it (`format_host`)."""
    header_timeout_s: int
    """Seconds in which the header of a request has to arrive."""
    body_timeout_s: int
    """Seconds in which its body has to, or as much of it as a buffer of HAProxy's holds (15 kB): until the deadline."""
    error_pages_folder: str
    """Folder of the files that answer errors."""
    max_requests: int
    """Questions (POST) that a replica takes at a time."""
    certificate: str = ""
    """File of the certificate, where clients are to encrypt; its key lies beside it (`key_path`)."""


def key_path(certificate: Path) -> Path:
    """Where HAProxy looks for the key of a certificate that stands in a file of its own (ssl-load-extra-files)."""
    return certificate.with_name(f"{certificate.name}.key")


def format_host(host: str) -> str:
    """The address as HAProxy writes it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def harden_config(text: str, options: HAProxyOptions, socket_path: Path) -> str:
    """Ray's file, closed: no page of statistics or metrics on a port, an admin socket of the owner's alone at the path
    `socket_path`, no log on the syslog port, no list of routes, the address that was asked for, a time-out for headers,
    our own errors, and no more requests for the replicas than they take. The only replica has more time for a health
    check.

    Raises `UnknownHAProxyConfig` where a line that is to be changed does not stand there exactly once, and where
    anything but the endpoint would listen afterwards, or stand in for replicas.
    """
    errors = "\n".join(
        f"    errorfile {status} {options.error_pages_folder}/{status}.http" for status in ERROR_PAGE_STATUSES
    )
    # Browsers open connections that they may never use; without the option each would be answered 408.
    # HAProxy can retry a request on another replica only if it had buffered all of it.
    tls = f" ssl crt {options.certificate} alpn http/1.1 ssl-min-ver TLSv1.2" if options.certificate else ""
    body = [
        f"http-request wait-for-body time {options.body_timeout_s}s if METH_POST",
        # A replica's parser would take its head for the whole request, and the body for others' requests.
        "http-request del-header upgrade",
    ]
    address = "\n    ".join([rf"\g<1>{options.host}:\2{tls}", *body, *_security_header_lines(options)])
    header = f"    timeout http-request {options.header_timeout_s}s\n    option http-ignore-probes"
    changes = {
        "the log on the syslog port": (r"^    log \S+ local0 info\n", ""),
        "the admin socket": (
            r"^(    stats socket )\S+( mode )666( level admin expose-fd listeners)$",
            rf"\g<1>{socket_path}\g<2>600\3",
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
            raise UnknownHAProxyConfig(
                f"Ray Serve's file for HAProxy has {name} {count} times in the form that rtrain knows"
            )
    # There only where gRPC is on.
    grpc = r"^(frontend grpc_frontend\n(?:    #.*\n)*    bind )\S+:(\d+ proto h2)$"
    text = re.sub(grpc, rf"\g<1>{options.host}:\2", text, flags=re.MULTILINE)
    if re.search(r"^\s*server\s.*\sbackup\b", text, re.MULTILINE):
        raise UnknownHAProxyConfig(
            "Ray Serve's file for HAProxy has a server beside the replicas that rtrain does not know"
        )
    text = re.sub(
        r"^backend .*\n(?:    .*\n?)*", lambda match: _extend_backend(match[0], options), text, flags=re.MULTILINE
    )
    binds = re.findall(r"^\s*bind\s+(.*)$", text, re.MULTILINE)
    expected_bind = rf"{re.escape(options.host)}:\d+(?: proto h2|{re.escape(tls)})?"
    unknown_binds = [bind for bind in binds if not re.fullmatch(expected_bind, bind)]
    if unknown_binds:
        raise UnknownHAProxyConfig(
            f"Ray Serve's file for HAProxy opens {', '.join(unknown_binds)}, which rtrain does not know"
        )
    return text


def _extend_backend(backend: str, options: HAProxyOptions) -> str:
    """A backend of replicas with our lines; any other one as it is."""
    if not has_servers(backend):
        return backend
    first, rest = backend.split("\n", 1)
    check_timeout_lines = list[str]()
    if len(re.findall(r"^    server ", rest, re.MULTILINE)) == 1:
        # The only replica has no substitute. While it loads a model, or lacks processor time, it misses health checks
        # and still answers requests late; a dead replica refuses connections, and needs no check.
        check_timeout_lines = [f"timeout check {options.body_timeout_s + CHECK_MARGIN_S}s"]
    return "\n".join(
        [
            first,
            *(f"    {line}" for line in (*check_timeout_lines, *_error_count_lines(), *_limit_lines(options))),
            rest,
        ]
    )


def _error_count_lines() -> list[str]:
    """What HAProxy answers itself is counted, in a table of one row: no replica knows of it."""
    counts = " ".join(f"{status}=%[sc_get_gpc({place},0)]" for place, status in enumerate(COUNTED_STATUSES))
    return [
        f"stick-table type integer size 1 store gpc({len(COUNTED_STATUSES)})",
        "http-request track-sc0 int(1)",
        f"http-request del-header {PROXY_ERRORS_HEADER}",  # a client's
        f'http-request set-header {PROXY_ERRORS_HEADER} "{counts}" if {{ path /metrics }}',
        "http-response set-var(txn.from_replica) bool(true)",
        *(
            f"http-after-response sc-inc-gpc({place},0) if {{ status {status} }} !{{ var(txn.from_replica) -m found }}"
            for place, status in enumerate(COUNTED_STATUSES)
        ),
    ]


def _security_header_lines(options: HAProxyOptions) -> list[str]:
    """What HAProxy answers itself has the headers that the replicas' answers have."""
    return [
        f'http-after-response set-header {name} "{value}" if !{{ var(txn.from_replica) -m found }}'
        for name, value in security_headers(bool(options.certificate)).items()
    ]


def security_headers(tls: bool) -> dict[str, str]:
    """Headers of replies other than pages; `tls`: clients use TLS."""
    tls_headers = {"strict-transport-security": HSTS_VALUE} if tls else {}
    return {**SECURITY_HEADERS, **tls_headers, CONTENT_POLICY_HEADER: NON_PAGE_CONTENT_POLICY}


def _limit_lines(options: HAProxyOptions) -> list[str]:
    """Answer 503 while the replicas are full. Otherwise each rejection would cost a replica time; and a connection
    above a replica's socket backlog fails, after which HAProxy marks the replica as down and rejects everything. Other
    reads, of metrics or pages, have a higher limit (`READ_REQUEST_FACTOR`), and health checks none."""
    headers = f"hdr retry-after {RETRY_AFTER_VAR} hdr x-request-id %[uuid]"
    body = f"status 503 content-type application/json lf-file {options.error_pages_folder}"
    pages = ((DOWN_PAGE_V2, "!up v2"), (BUSY_PAGE, "up full !v2"), (BUSY_PAGE_V2, "up full v2 !health"))
    answers = [f"http-request return {body}/{page} {headers} if {which}" for page, which in pages]
    max_read_requests = READ_REQUEST_FACTOR * options.max_requests
    replica_retry_after = "res.hdr(retry-after) if { status 503 } { res.hdr(retry-after) -m found }"
    is_recent = f"{{ date,sub(proc.retry_after_at) lt {RETRY_AFTER_TTL_S} }}"
    return [
        f"http-request set-var(txn.max_requests) nbsrv,mul({options.max_requests})",
        f"http-request set-var(txn.max_requests) nbsrv,mul({max_read_requests}) unless METH_POST",
        # When to come again the replicas know, who see what waits and how fast it is answered.
        f"http-response set-var(proc.retry_after) {replica_retry_after}",
        "http-response set-var(proc.retry_after_at) date if { status 503 } { res.hdr(retry-after) -m found }",
        "http-request set-var(txn.retry_after) str(1)",
        f"http-request set-var(txn.retry_after) var(proc.retry_after) if {is_recent}",
        "acl full be_conn,sub(txn.max_requests) gt 0",
        "acl up nbsrv gt 0",
        "acl v2 path_reg '^(/models/[^/]+)?/v2(/|$)'",
        "acl health path_reg '^(/models/[^/]+)?/v2/health/'",
        *answers,
    ]


def parse_admin_socket(text: str) -> Path:
    """Path of the admin socket in a configuration that `harden_config` accepts."""
    return Path(re.findall(r"^    stats socket (\S+)", text, re.MULTILINE)[0])


def has_servers(text: str) -> bool:
    """Whether a file names a replica."""
    return re.search(r"^\s*server\s", text, re.MULTILINE) is not None
