"""The page to try a model: what holds of its files, without a browser. `test_page_in_browser` looks at it in one."""

import re
import tomllib
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fastapi import FastAPI

from rtrain.config.recipe import TASKS
from rtrain.tasks import base
from serve import pages
from tests import serving
from tests.serving import call

app, predictor = serving.app, serving.predictor  # fixtures

FOLDER = Path(__file__).resolve().parents[1] / "serve" / "page"
TEXTS = {name: (FOLDER / name).read_text(encoding="utf-8") for name in pages.FILES}
SCRIPT, STYLE = TEXTS["page.js"], TEXTS["page.css"]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.feed(TEXTS["index.html"])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value]


def test_its_files_are_served_and_are_all_there_is(app: FastAPI) -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(pages.FILES)
    several = FastAPI()
    several.include_router(pages.SEVERAL)
    routes = {"index.html": (app, "/"), "page.css": (app, "/page.css"), "page.js": (app, "/page.js")}
    routes |= {"models.html": (several, "/"), "models.js": (several, "/models.js")}
    routes |= {"docs.html": (app, "/docs"), "docs.js": (app, "/docs/docs.js")}
    assert call(several, "GET", "/page.css").text == STYLE
    for name, kind in pages.FILES.items():
        at, path = routes[name]
        response = call(at, "GET", path)
        assert (response.status_code, response.headers["content-type"]) == (200, kind)
        assert response.text == TEXTS[name]
        own = pages.SWAGGER_HEADERS if name == "docs.html" else pages.HEADERS
        assert {header: response.headers[header] for header in own} == own
    assert call(app, "GET", "/page.html").status_code == 404
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["serve"]
    assert all(any(fnmatch(f"page/{name}", pattern) for pattern in patterns) for name in pages.FILES)


def test_it_asks_no_address_but_its_own() -> None:
    for name, text in TEXTS.items():
        assert not re.findall(r"https?:|url\(|@import|(?<![:/])//(?! )", text), f"{name} names another address"
    asked = re.findall(r"fetch\(([^,)]+)", SCRIPT)
    assert asked == ['"predict"', '"info"']
    tags = Tags()
    links = [value for _, names in tags.found for name, value in names.items() if name in ("src", "href", "action")]
    assert links == ["page.css", "page.js", "../../"]
    assert re.findall(r"fetch\(([^,)]+)", TEXTS["models.js"]) == ['"v2/repository/index"']


def test_the_description_of_the_routes_needs_no_internet(app: FastAPI) -> None:
    page = call(app, "GET", "/docs").text
    names = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert names == ["data:,", "docs/swagger-ui.css", "docs/swagger-ui-bundle.js", "docs/docs.js"]
    for name in names[1:]:
        response = call(app, "GET", f"/{name}")
        assert response.status_code == 200
        assert response.headers["content-type"] in (*pages.FILES.values(), *pages.SWAGGER_FILES.values())
    assert b"3.1" in call(app, "GET", "/docs/swagger-ui-bundle.js").content
    assert call(app, "GET", "/openapi.json").json()["openapi"].startswith("3.1")
    assert call(app, "GET", "/docs/favicon.png").status_code == 404


def test_its_policy_allows_what_it_does_and_nothing_else() -> None:
    policy = dict(part.strip().split(" ", 1) for part in pages.HEADERS["content-security-policy"].split(";"))
    assert policy == {
        "default-src": "'none'",
        "style-src": "'self'",
        "script-src": "'self'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    for tag, names in Tags().found:
        assert not [name for name in names if name == "style" or name.startswith("on")], f"<{tag}> has inline code"
    assert not re.findall(r"<style|<script(?! src)|<img|<iframe|<form[^>]* action", TEXTS["index.html"])


def test_nothing_is_written_as_markup() -> None:
    for script in (SCRIPT, TEXTS["models.js"]):
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|DOMParser", script)
    assert set(re.findall(r"setAttribute\(\"([\w-]+)", SCRIPT)) == {"role", "aria-label"}
    assert "localStorage" not in SCRIPT, "a key would stay on the machine"


def test_every_kind_of_answer_has_a_renderer_and_a_description() -> None:
    outputs = {base.get(task).output for task in TASKS}
    [table] = re.findall(r"const RENDERERS = \{\n(.*?)\n\};", SCRIPT, re.S)
    renderers = dict(re.findall(r"(\w+): (\w+),", table))
    assert set(renderers) == outputs
    assert all(f"function {function}(" in SCRIPT for function in renderers.values())
    [words] = re.findall(r"const WORDS = \{\n(.*?)\n\};", SCRIPT, re.S)
    assert set(re.findall(r"(\w+): \"", words)) == outputs
    fields = {field for task in TASKS for field in base.get(task).fields}
    [names] = re.findall(r"const NAMES = \{(.*?)\};", SCRIPT)
    assert set(re.findall(r"(\w+): \"", names)) == fields


def test_the_script_uses_elements_that_the_page_has() -> None:
    ids = Tags().ids
    assert len(ids) == len(set(ids)) > 10
    used = set(re.findall(r"element\(\"([\w-]+)\"\)", SCRIPT))
    assert len(used) > 10
    assert used <= set(ids)
    several = TEXTS["models.html"]
    assert all(f'id="{name}"' in several for name in re.findall(r"element\(\"([\w-]+)\"\)", TEXTS["models.js"]))
    labelled = {names["for"] for tag, names in Tags().found if tag == "label" and "for" in names}
    assert labelled <= set(ids)


def test_the_style_has_both_themes_and_both_widths() -> None:
    assert "prefers-color-scheme: dark" in STYLE
    assert "color-scheme: light dark" in STYLE
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.S)
    names = [set(re.findall(r"(--[\w-]+):", theme)) for theme in (light, dark)]
    assert names[0] == names[1] != set()
    [colours] = re.findall(r"const COLOURS = (\d+);", SCRIPT)
    assert {f"--c{number}" for number in range(int(colours))} <= names[0]
    used = set(re.findall(r"var\((--[\w-]+)\)", STYLE)) - {"--share", "--c"}
    assert used <= names[0]


def channels(colour: str) -> list[float]:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


@pytest.mark.parametrize(
    ("ink", "paper"),
    [
        ("--ink", "--paper"),
        ("--ink", "--panel"),
        ("--soft", "--paper"),
        ("--soft", "--panel"),
        ("--bad", "--paper"),
        ("--on-act", "--act"),
        *((f"--c{number}", "--paper") for number in range(8)),
    ],
)
def test_text_can_be_read_in_both_themes(ink: str, paper: str) -> None:
    """The contrast that WCAG 2.1 asks of text: 4.5."""
    for theme in re.findall(r":root \{(.*?)\}", STYLE, re.S):
        colours = dict(re.findall(r"(--[\w-]+): (#\w{6})", theme))
        luminance = []
        for name in (ink, paper):
            red, green, blue = channels(colours[name])
            luminance.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
        assert (max(luminance) + 0.05) / (min(luminance) + 0.05) >= 4.5
