"""The command line: verbs only. Each parses, calls one function, and prints; heavy imports are inside the verbs."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rtrain import __version__, env
from rtrain.cluster import session as sessions
from rtrain.errors import ConfigError, Problem, UserError
from rtrain.options import (
    Address,
    DataOption,
    Insecure,
    Json,
    ModelOption,
    New,
    Out,
    Recipe,
    Resume,
    Set,
    TestOption,
    ValidOption,
    Workers,
    configured,
    leave_to_supervisor,
    opened,
    overrides_of,
    reuse_of,
)

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
recipes_app = typer.Typer(no_args_is_help=True, help="List the recipes, or print one.")
app.add_typer(recipes_app, name="recipes")

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script and of `python -m rtrain`; `arguments` default to the command line's."""
    env.prepare()
    code = None
    try:
        sessions.forget_folder()  # `python -m` has put the current folder first on the module path
        code = app(arguments, standalone_mode=False)  # typer turns KeyboardInterrupt into the returned code 130
    except UserError as error:
        print(f"rtrain: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except typer.TyperException as error:
        print(f"rtrain: {error.format_message()} (rtrain --help lists what there is)", file=sys.stderr)
        sys.exit(2)
    if code == INTERRUPTED:
        print("rtrain: interrupted", file=sys.stderr)
    if code:
        sys.exit(code)


def _print(document: Any, as_json: bool, text: str) -> None:
    print(json.dumps(document, ensure_ascii=False) if as_json else text)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """From a file of text to an HTTP answer: train, search, shrink and serve text encoders on Ray."""
    if version:
        print(__version__)
        raise typer.Exit


@recipes_app.command("list")
def recipes_list() -> None:
    """Names of the recipes that come with rtrain."""
    from rtrain import config

    print("\n".join(config.recipe_names()))


@recipes_app.command("show")
def recipes_show(name: str) -> None:
    """Print a recipe's commented YAML; save it, edit it, and give the file's name in place of the recipe's."""
    from rtrain import config

    print(config.recipe_text(name), end="")


@app.command()
def train(
    recipe: Recipe = None,
    data: DataOption = None,
    valid: ValidOption = None,
    test: TestOption = None,
    model: ModelOption = None,
    workers: Workers = None,
    out: Out = None,
    assignments: Set = None,
    address: Address = None,
    resume: Resume = False,
    new: New = False,
    as_json: Json = False,
) -> None:
    """Fine-tune an encoder on a file of texts; ends with an artefact that predict and serve take."""
    short = {"data": data, "valid": valid, "test": test, "model": model, "workers": workers, "address": address}
    config, folder, reuse = opened(recipe, assignments, out, resume, new, **short)
    from rtrain.cluster.session import session
    from rtrain.report.progress import Line, summary_text
    from rtrain.runs import driver

    source, _ = driver.check(config, folder.parent)
    with session(config, folder.parent), Line() as line:
        prepared = driver.prepare(config, folder, reuse, source=source)
        summary = driver.fit(prepared, on_event=line)
    _print(summary, as_json, summary_text(summary, prepared.run))


@app.command()
def tune(
    recipe: Recipe = None,
    data: DataOption = None,
    valid: ValidOption = None,
    test: TestOption = None,
    model: ModelOption = None,
    workers: Workers = None,
    out: Out = None,
    assignments: Set = None,
    address: Address = None,
    resume: Resume = False,
    new: New = False,
    as_json: Json = False,
) -> None:
    """Search learning rate and aggregation frequency, then continue the best trial to its full budget."""
    short = {"data": data, "valid": valid, "test": test, "model": model, "workers": workers, "address": address}
    config, folder, reuse = opened(recipe, assignments, out, resume, new, "-search", **short)
    from rtrain.cluster.session import session
    from rtrain.report.progress import Line, search_text
    from rtrain.runs import driver
    from tune import search

    search.check(config)
    driver.check(config, folder.parent)
    with session(config, folder.parent), Line() as line:
        found = search.run(config, folder, reuse, on_event=line)
        winner = search.continue_best(found, on_event=line)
    _print({**found.to_document(), "winner": winner}, as_json, search_text(found, winner))


@app.command()
def verify(
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name or a YAML file.")] = None,
    ledger: Annotated[Path | None, typer.Option("--ledger", help="Check which rows this run trained on.")] = None,
    data: DataOption = None,
    test: TestOption = None,
    model: ModelOption = None,
    workers: Workers = None,
    out: Out = None,
    assignments: Set = None,
    address: Address = None,
    full: Annotated[bool, typer.Option("--full", help="The large matrix, on up to 1,003 rows.")] = False,
    planted: Annotated[bool, typer.Option("--planted", help="Plant five bugs: each must be seen.")] = False,
    as_json: Json = False,
) -> None:
    """Show that workers, micro-batch and resumes change nothing but speed; or, by --ledger, which rows a run saw."""
    if (recipe is None) == (ledger is None):
        fix = "write rtrain verify RECIPE --data FILE, or rtrain verify --ledger RUN"
        raise ConfigError([Problem("verify", recipe, "takes a recipe or --ledger, one of them", fix)])
    report = (
        _ledger(ledger)
        if ledger
        else _layouts(
            recipe, out, full, planted, assignments, data=data, test=test, model=model, workers=workers, address=address
        )
    )
    _print(report.to_document(), as_json, report.text())
    if not report.to_document()["passed"]:
        raise typer.Exit(1)


def _ledger(run: Path) -> Any:
    from rtrain.proof import ledger

    return ledger.check(run.absolute())


def _layouts(
    recipe: str | None, out: str | None, full: bool, planted: bool, assignments: list[str] | None, **short: Any
) -> Any:
    from rtrain.cluster.session import session
    from rtrain.proof import verify as proof
    from rtrain.report.progress import Line
    from rtrain.runs import driver, opening

    assert recipe is not None
    config = opening.absolute(configured(recipe, assignments, **short))
    folder = opening.folder_for(f"{config.recipe.name}-verify", out)
    driver.check(config, folder.parent)
    with session(proof.session_config(config, full), folder.parent), Line() as line:
        return proof.run(config, folder, full=full, bugs=planted, on_event=line)


@app.command()
def drill(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or a YAML file.")],
    data: DataOption = None,
    test: TestOption = None,
    model: ModelOption = None,
    workers: Workers = None,
    out: Out = None,
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """Kill a run again and again, resume it, and compare it with one that was never touched."""
    from rtrain.cluster.session import session
    from rtrain.proof import drill as proof
    from rtrain.report.progress import Line
    from rtrain.runs import driver, opening

    config = opening.absolute(configured(recipe, assignments, data=data, test=test, model=model, workers=workers))
    folder = opening.folder_for(f"{config.recipe.name}-drill", out)
    driver.check(config, folder.parent)
    with session(config, folder.parent), Line() as line:
        certificate = proof.run(config, folder, on_event=line)
    _print(certificate.to_document(), as_json, certificate.text())
    if not certificate.passed:
        raise typer.Exit(1)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="Run folder, also of a run that has not ended.")]) -> None:
    """Write RUN/report.html: the rows, the curves, the answers, where the time went; one page, offline."""
    from rtrain.report import html

    print(html.make(run.absolute()))


@app.command()
def distill(
    run: Annotated[Path, typer.Argument(help="Run folder of the teacher.")],
    out: Out = None,
    assignments: Set = None,
    address: Address = None,
    resume: Resume = False,
    new: New = False,
    as_json: Json = False,
) -> None:
    """Train a student with fewer layers on a run's rows and its model's answers."""
    from rtrain.runs import opening

    teacher, reuse = run.absolute(), reuse_of(resume, new)
    config = opening.stored(teacher, overrides_of(assignments, address=address))
    folder = Path(out).absolute() if out else teacher.with_name(f"{teacher.name}-student")
    leave_to_supervisor(config, folder, reuse)
    from rtrain.cluster.session import session
    from rtrain.compress import distill as distillation
    from rtrain.report.progress import Line, summary_text

    with session(distillation.settled(config, folder, reuse), folder.parent), Line() as line:
        student, summary = distillation.run(config, teacher, folder, reuse, on_event=line)
    _print(summary, as_json, summary_text(summary, student))


@app.command()
def quantize(
    run: Annotated[Path, typer.Argument(help="Run folder whose artefact is quantized.")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the int8 artefact.")] = None,
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """Make an int8 artefact with static scales, calibrated on training rows, and score it on the test rows."""
    from rtrain.compress import quantize as quantization

    config = configured(str(run / "config.yaml"), assignments)
    report = quantization.run(
        config.recipe, quantization.store_of(run.absolute()), run.absolute(), (out or run / "artifact-int8").absolute()
    )
    _print(report, as_json, "\n".join(f"{name:>16}  {value}" for name, value in report.items()))


@app.command()
def evaluate(
    artifact: Annotated[Path, typer.Argument(help="Artefact folder.")],
    data: Annotated[str, typer.Option("--data", help="Rows with texts and labels.")],
    assignments: Set = None,
    as_json: Json = False,
) -> None:
    """Score an artefact on a file of rows, through the path that answers requests; the columns are those of its own
    training rows, but for what --set data.label=... and so on say."""
    from rtrain import artifact as artifacts, config, score
    from rtrain.metrics import scores

    overrides = {"data.path": data, **dict(config.parse_assignment(text) for text in assignments or ())}
    folder = artifact.absolute()
    report = score.run(folder, score.settings(artifacts.read(folder), overrides))
    rate = f"{report['bad_rows']} bad rows, {report['rows_per_second']} rows/s"
    _print(report, as_json, f"{scores.text(report)}\n\n{rate}")


@app.command()
def predict(
    artifact: Annotated[Path, typer.Argument(help="Artefact folder.")],
    texts: Annotated[list[str] | None, typer.Argument(help="Texts; without any, lines of standard input.")] = None,
    top: Annotated[int, typer.Option("--top", help="Labels per text.", min=1)] = 1,
    batch: Annotated[int, typer.Option("--batch", help="Most texts of one engine call.", min=1)] = 32,
    as_json: Json = False,
) -> None:
    """Answer texts with an artefact, one line each."""
    from rtrain.predict import Predictor

    inputs = list(texts or [line.rstrip("\n") for line in sys.stdin])
    answers = Predictor.load(artifact.absolute())(inputs, {"top_k": top}, batch_rows=batch)
    if as_json:
        print(json.dumps(answers, ensure_ascii=False))
        return
    for answer in answers:
        print(_answer_text(answer))


def _answer_text(answer: Any) -> str:
    """Labels and scores of a text, a number, or an answer in words, tab-separated."""
    if isinstance(answer, float):
        return f"{answer:.4f}"
    if isinstance(answer, list):
        return "\t".join(_answer_text(entry) for entry in answer)
    return "\t".join(f"{value:.4f}" if isinstance(value, float) else str(value) for value in answer.values())


@app.command()
def explain(
    artifact: Annotated[Path, typer.Argument(help="Float artefact folder.")],
    text: Annotated[str | None, typer.Argument(help="A text; without it standard input, as a whole.")] = None,
    pair: Annotated[str | None, typer.Option("--pair", help="The second text, where there are two.")] = None,
    label: Annotated[str | None, typer.Option("--label", help="Explain this label instead of the answer's.")] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Of the integral; default: doubled until the error is below 1 %.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which words, and which sentences, an answer rests on, by integrated gradients."""
    from rtrain.explain.explainer import Explainer
    from rtrain.predict import Predictor
    from rtrain.report import explanation

    predictor = Predictor.load(artifact.absolute())
    first, second = predictor.task.fields
    read = sys.stdin.read() if text is None else text
    [found] = Explainer(predictor)([read if pair is None else {first: read, second: pair}], label, steps)
    document = found.to_document()
    if as_json:
        print(json.dumps(document, ensure_ascii=False))
    else:
        explanation.show(document, sys.stdout)


@app.command()
def serve(
    artifact: Annotated[Path, typer.Argument(help="Artefact folder.")],
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on (default 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port (default 8000; 0 takes a free one).")] = None,
    insecure: Insecure = False,
    assignments: Set = None,
    address: Address = None,
) -> None:
    """Answer HTTP requests with an artefact, on Ray Serve, until Ctrl-C."""
    from rtrain import artifact as artifacts
    from rtrain.cluster.session import session, until_interrupted
    from rtrain.report.progress import say
    from serve import access, deployment

    config = configured("intent", assignments, host=host, port=port, insecure=insecure or None, address=address)
    access.check(config.deploy.serve, say)
    folder = artifact.absolute()
    artifacts.read(folder)
    with session(config, folder.parent), deployment.start(folder, config.deploy.serve) as endpoint:
        say(f"serving {folder} at {endpoint.url} (Ctrl-C ends it)")
        say(f"try: {access.curl(endpoint.url)}")
        until_interrupted()


@app.command()
def demo(
    out: Out = None,
    model: ModelOption = None,
    assignments: Set = None,
    address: Address = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the endpoint up until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """The whole path on the embedded data: ingest, search, train, distill, quantize, serve, ask."""
    from rtrain import demo as whole

    config = configured("demo", assignments, model=model, address=address)
    document = whole.run(config, out, keep=keep)
    if as_json:
        print(json.dumps(document, ensure_ascii=False))
    if not document["answer_matches"]:
        raise UserError("the endpoint's answers are not those of rtrain predict; see the table above")
