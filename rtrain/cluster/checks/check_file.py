"""`rtrain cluster lint`: problems of a cluster file, before anything is started.

The file belongs to Ray's launcher, or holds Kubernetes manifests. No cloud is queried: only the content of the file is
checked.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rtrain.cluster.checks import LintContext, LintFinding, kubernetes_rules, launcher_rules
from rtrain.cluster.cluster_file import (
    FILL_IN,
    ClusterFile,
    Document,
    InvalidYaml,
    YamlPath,
    format_path,
    parse_documents,
)
from rtrain.core.errors import ConfigError, UserError, suggest_path

RULE_ERRORS = (TypeError, AttributeError, ValueError, KeyError, OverflowError, ConfigError)
"""Exceptions of a rule whose value has an unexpected type or is not finite."""


def check_text(text: str, context: LintContext) -> list[LintFinding]:
    """Check a launcher file or manifests; findings are in line order."""
    try:
        documents = parse_documents(text)
    except InvalidYaml as error:
        return [_yaml_error(error.line, f"invalid YAML: {error.reason}", "fix this line or the line before it")]
    if not documents or not all(isinstance(document.value, dict) for document in documents):
        return [_yaml_error(1, "the file is not a map of settings", "write one, as rtrain cluster init does")]
    if "apiVersion" in documents[0].value:
        findings = list(_lint_manifests(documents, context))
    elif len(documents) > 1:
        message = f"the file has {len(documents)} documents; the launcher reads only one"
        findings = [_yaml_error(documents[1].line(), message, "write one map, as rtrain cluster init does")]
    else:
        findings = list(_lint_launcher_file(ClusterFile.from_document(documents[0]), context))
    return sorted(findings, key=lambda finding: (finding.line, finding.rule))


def _yaml_error(line: int, message: str, fix: str) -> LintFinding:
    return LintFinding("yaml", "error", line, message, fix)


def _lint_manifests(documents: list[Document], context: LintContext) -> Iterator[LintFinding]:
    try:
        for name, level, rule in kubernetes_rules.RULES:
            for line, message, fix in rule(documents, context):
                yield LintFinding(name, level, line, message, fix)
    except RULE_ERRORS as error:
        fix = "check it with kubeconform and KubeRay's definitions"
        yield _yaml_error(documents[0].line(), f"a manifest does not match KubeRay's schema ({error})", fix)


def _lint_launcher_file(file: ClusterFile, context: LintContext) -> Iterator[LintFinding]:
    """Run all rules; if the schema is violated, rules that fail are skipped."""
    is_schema_broken = False
    for name, level, rule in launcher_rules.RULES:
        try:
            for line, message, fix in rule(file, context):
                is_schema_broken = is_schema_broken or name == "schema"
                yield LintFinding(name, level, line, message, fix)
        except RULE_ERRORS as error:
            if not is_schema_broken:  # Ray's schema does not check a cloud's node_config
                message, line = f"a value does not match the cloud's schema: {error}", file.line("available_node_types")
                yield LintFinding(name, "error", line, message, "see the documentation of the cloud")


def fill_in_lines(text: str) -> list[int]:
    """Lines with a placeholder for the user."""
    return [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if FILL_IN in line and not line.lstrip().startswith("#")
    ]


def find_fill_ins(text: str) -> list[LintFinding]:
    """Report each placeholder, with the key of its value."""
    path_by_line: dict[int, YamlPath] = {}
    with suppress(InvalidYaml):
        for document in parse_documents(text):
            for path, value in document.walk():
                if isinstance(value, str) and FILL_IN in value:
                    line = document.line_of_text(path, FILL_IN)
                    # An alias comes first: the value is at the anchor, and the line belongs to a later key.
                    if line not in path_by_line or document.line(*path_by_line[line]) < document.line(*path):
                        path_by_line[line] = path
    return [
        LintFinding(
            *("fill-in", "error", number, f"{format_path(path_by_line.get(number, ()))} must be filled in"),
            f"replace {FILL_IN} as the comment above describes",
        )
        for number in fill_in_lines(text)
    ]


def read_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"{file}: the file does not exist; {suggest_path(file) or 'rtrain cluster init writes one'}",
            code="not_found",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}", code="unreadable") from None
