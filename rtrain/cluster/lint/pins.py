"""Rules about what is installed: pinned, and the same on both ends."""

import re

from rtrain.cluster.lint.around import Around
from rtrain.cluster.lint.clouds import get, nodes
from rtrain.cluster.lint.document import Document
from rtrain.cluster.lint.findings import Found, shown
from rtrain.cluster.lint.shell import commands, installs

IMAGES = ("image", "head_image", "worker_image")
OURS = ("ray", "rtrain")
"""Packages of which nodes and this machine must have the same version."""


NAME_DIGEST = "name it by its digest: IMAGE@sha256: and 64 hexadecimal digits"


def find_unpinned(image: object) -> str | None:
    """What is wrong with an image that is not named by a digest; None for one that is, or whose digest is left to be
    filled in."""
    digest = str(image).partition("@sha256:")[2]
    if not digest:
        return f"the image {image} is another one tomorrow"
    is_digest = re.fullmatch(r"[0-9a-f]{64}|FILL-IN", digest)
    return None if is_digest else f"the image {image} has no digest of SHA-256 behind @sha256:"


def images(document: Document, around: Around) -> Found:
    for place, value in document.walk():
        if place[-1] in IMAGES and "docker" in place and isinstance(value, str) and (what := find_unpinned(value)):
            yield document.line(*place), f"{shown(place)}: {what}", NAME_DIGEST
    for node in nodes(document):
        image = get(node.config, *node.cloud.image)
        if node.cloud.moves(image):
            which = "has no image" if image is None else f"has the image {image}"
            what = f"{node.name} {which}: what starts is another one tomorrow"
            yield document.line(*node.place(*node.cloud.image)), what, "name one image by its number"


def packages(document: Document, around: Around) -> Found:
    for install in installs(document):
        for package in install.packages:
            line = document.within(install.command.place, package.split("[")[0])
            if re.search(r"/latest/|nightly|\.dev0", package):
                yield line, f"{package} is a build of the night", "install a release"
            elif package.startswith((".", "/", "~")) or "://" not in package:
                if not install.constrained and "==" not in package and not package.endswith(".whl"):
                    what = f"{package} is installed without a version: nodes that start tomorrow get another one"
                    yield line, what, f"write {package}==VERSION, or -c constraints.txt"
            elif "@" not in package and "#sha256=" not in package:
                what = f"{package} is installed from an address, without a digest"
                yield line, what, "append #sha256=..., or install a release from the index"


REQUIREMENTS = ("-r", "--requirement")


def hashes(document: Document, around: Around) -> Found:
    """What is fetched is what was tested only where its digest says so; above all where an index that others write to
    may answer in another's place."""
    for install in installs(document):
        given = {word.partition("=")[0] for word in install.words}
        plain = [word for word in install.words if re.match(r"(--[\w-]+=)?http://", word)]
        if "--require-hashes" in given and "--trusted-host" not in given:
            continue
        for name, told in (
            ("--extra-index-url", "a package of the same name and a higher version on either index is taken"),
            ("--trusted-host", "whoever is in between may answer"),
        ):
            if name in given:
                line = document.within(install.command.place, name)
                yield line, f"pip install {name}: {told}", "name one index, or --require-hashes -r FILE"
        for word in plain:
            what = f"packages come from {word}, in plain text: whoever is in between may answer"
            yield document.within(install.command.place, "http://"), what, "write https://, or --require-hashes -r FILE"
        if given & set(REQUIREMENTS):
            what = "a file of requirements is installed without digests: a release that was replaced goes unseen"
            line = document.within(install.command.place, "pip")
            yield line, what, "add --require-hashes, with a file that pip-compile --generate-hashes has written"


def scripts(document: Document, around: Around) -> Found:
    for command in commands(document):
        if found := re.search(r"\b(?:curl|wget)\b[^;&\n]*\|\s*(?:sudo\s+)?(?:ba|z)?sh\b", command.text):
            what = f"{shown(command.place)} runs what it has just fetched, whatever that is today"
            line = document.within(command.place, found[0].split()[0])
            yield line, what, "install a package of a known version, or check a digest before it is run"


def versions(document: Document, around: Around) -> Found:
    for number, line in enumerate(document.text.splitlines(), 1):
        for package in OURS:
            told = re.findall(rf"(?<![\w.-]){package}(?:\[[\w,\s]*\])?==([\d.]+\w*)", line)
            told += re.findall(rf"\brayproject/{package}(?:-ml)?:(\d[\w.]*)", line)
            told += re.findall(r"\bRay version that the nodes get \(([\d.]+)\)", line) if package == "ray" else []
            here = around.version(package)
            for version in told:
                if here is not None and version != here:
                    what = f"nodes get {package} {version}, and this machine has {here}"
                    yield number, what, f"write {package}=={here}, or install {version} here"
    mounted = document.get("file_mounts", default={}) or {}
    for remote, local in _constraints_of(mounted):
        for package in OURS:
            pinned, here = around.constraints().get(package), around.version(package)
            if pinned and here and pinned != here:
                what = f"nodes get {package} {pinned} by {local}, and this machine has {here}"
                yield document.line("file_mounts", remote), what, f"install {package}=={pinned} here, or mend {local}"
    pinned_fsspec = around.constraints().get("fsspec")
    for install in installs(document):
        for package in install.packages:
            name, _, version = package.partition("==")
            if name == "s3fs" and version and pinned_fsspec and version != pinned_fsspec:
                what = f"s3fs {version} wants fsspec {version}, and constraints.txt pins {pinned_fsspec}"
                yield document.within(install.command.place, "s3fs"), what, f"write s3fs=={pinned_fsspec}"


def _constraints_of(mounts: dict[str, str]) -> list[tuple[str, str]]:
    return [(remote, local) for remote, local in mounts.items() if str(local).endswith("constraints.txt")]


def missing_mounts(document: Document, around: Around) -> Found:
    mounts = document.get("file_mounts", default={}) or {}
    for remote, local in mounts.items():
        path = around.folder / str(local)
        if not str(local).startswith("~") and not path.exists():
            what = f"{local}, which is to be copied to the nodes, is not there"
            yield document.line("file_mounts", remote), what, "name a path relative to the folder of the file"
