"""`rtrain cluster lint`: problems of a cluster file, before anything is started.

The file belongs to Ray's launcher, or holds Kubernetes manifests. No cloud is queried: only the content of the file is
checked.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import resources
from pathlib import Path

from rtrain.cluster.checks import node_rules, ray_start_rules
from rtrain.cluster.checks.clouds import CLOUDS
from rtrain.cluster.checks.findings import FILL_IN, Level, LintContext, LintFinding, RuleResults, format_path
from rtrain.cluster.checks.yaml_document import Document, InvalidYaml, YamlPath, parse_documents
from rtrain.cluster.kubernetes import rules
from rtrain.core.errors import UserError, suggest_path

LauncherRule = Callable[[Document, LintContext], RuleResults]


def check_schema(document: Document, context: LintContext) -> RuleResults:
    """Check the launcher file against Ray's own schema, which ships with Ray."""
    import jsonschema

    ray_schema = json.loads((resources.files("ray.autoscaler") / "ray-schema.json").read_text(encoding="utf-8"))
    for error in jsonschema.Draft7Validator(ray_schema).iter_errors(document.value):
        path = tuple(error.absolute_path)
        unknown_keys = re.findall(r"'([^']+)'", error.message) if error.validator == "additionalProperties" else []
        line = document.line(*path, *unknown_keys[:1])
        yield line, f"{format_path(path)}: {error.message}", "write a key or value that Ray's launcher supports"
    node_types, head_type = document.get("available_node_types"), document.get("head_node_type")
    if isinstance(node_types, dict) and head_type not in node_types:
        message = "head_node_type is not one of available_node_types"
        yield document.line("head_node_type"), message, f"write one of {', '.join(map(str, node_types))}"


def check_provider(document: Document, context: LintContext) -> RuleResults:
    provider_type = document.get("provider", "type")
    if provider_type not in (None, "local", *CLOUDS):
        message = f"provider.type is {provider_type}: rules about nodes, addresses and permissions do not support it"
        yield document.line("provider", "type"), message, f"write {', '.join(CLOUDS)} or local"


RULES: tuple[tuple[str, Level, LauncherRule], ...] = (
    ("schema", "error", check_schema),
    ("provider", "error", check_provider),
    ("public-address", "error", node_rules.check_public_address),
    ("zone", "error", node_rules.check_zone),
    ("head-tasks", "warning", node_rules.check_head_tasks),
    ("resources", "error", node_rules.check_resources),
    ("limits", "error", node_rules.check_limits),
    ("spot-head", "error", node_rules.check_spot_head),
    ("spot-watcher", "warning", node_rules.check_spot_watcher),
    ("spot-label", "warning", node_rules.check_spot_label),
    ("token-mode", "error", ray_start_rules.check_token_mode),
    ("token-file", "error", ray_start_rules.check_token_file),
    ("worker-token", "error", ray_start_rules.check_worker_token),
    ("version", "error", ray_start_rules.check_versions),
    ("mount", "error", ray_start_rules.check_file_mounts),
    ("dashboard", "error", ray_start_rules.check_dashboard),
    ("autoscaler", "error", ray_start_rules.check_autoscaler_file),
    ("address", "error", ray_start_rules.check_worker_joins_head),
    ("storage", "error", ray_start_rules.check_storage),
    ("start-hook", "error", ray_start_rules.check_start_hook),
    ("command-names", "error", ray_start_rules.check_command_names),
    ("capacity", "error", ray_start_rules.check_capacity),
)
RULE_ERRORS = (TypeError, AttributeError, ValueError, KeyError, OverflowError)
"""Exceptions of a rule whose value has an unexpected type or is not finite."""


def check_text(text: str, context: LintContext) -> list[LintFinding]:
    """Check a launcher file or manifests; findings are in line order."""
    try:
        documents = parse_documents(text)
    except InvalidYaml as error:
        return [
            LintFinding(
                "yaml", "error", error.line, f"invalid YAML: {error.reason}", "fix this line or the line before it"
            )
        ]
    if not documents or not all(isinstance(document.value, dict) for document in documents):
        return [
            LintFinding(
                "yaml", "error", 1, "the file is not a map of settings", "write one, as rtrain cluster init does"
            )
        ]
    if "apiVersion" in documents[0].value:
        findings = list(_lint_manifests(documents, context))
    elif len(documents) > 1:
        message = f"the file has {len(documents)} documents; the launcher reads only one"
        findings = [
            LintFinding("yaml", "error", documents[1].line(), message, "write one map, as rtrain cluster init does")
        ]
    else:
        findings = list(_lint_launcher_file(documents[0], context))
    return sorted(findings, key=lambda finding: (finding.line, finding.rule))


def _lint_manifests(documents: list[Document], context: LintContext) -> Iterator[LintFinding]:
    try:
        yield from rules.check_manifests(documents, context)
    except RULE_ERRORS as error:
        message = f"a manifest does not match KubeRay's schema ({error})"
        yield LintFinding(
            "yaml", "error", documents[0].line(), message, "check it with kubeconform and KubeRay's definitions"
        )


def _lint_launcher_file(document: Document, context: LintContext) -> Iterator[LintFinding]:
    """Run all rules; if the schema is violated, rules that fail are skipped."""
    is_schema_broken = False
    for name, level, rule in RULES:
        try:
            for line, message, fix in rule(document, context):
                is_schema_broken = is_schema_broken or name == "schema"
                yield LintFinding(name, level, line, message, fix)
        except RULE_ERRORS as error:
            if not is_schema_broken:  # Ray's schema does not check a cloud's node_config
                message = f"a value does not match the cloud's schema: {error}"
                yield LintFinding(
                    name, "error", document.line("available_node_types"), message, "see the documentation of the cloud"
                )


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
