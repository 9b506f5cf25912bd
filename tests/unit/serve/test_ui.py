"""The page to try a model: what holds of its files, without a browser. `test_page_in_browser` looks at it in one."""

import re
import tomllib
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path

from starlette.types import ASGIApp

from rtrain.config import ServeConfig
from rtrain.inference.predictor import Predictor
from serve import app as serve_app
from serve.app import ModelApp
from serve.registry import ModelRegistry
from tests.support.root import ROOT
from tests.support.serving import call

FOLDER = ROOT / "serve" / "page"
FILES = ("index.html", "page.css", "page.js", "models.html", "models.js", "docs.html", "docs.js")
TEXTS = {name: (FOLDER / name).read_text(encoding="utf-8") for name in FILES}
SCRIPT, STYLE = TEXTS["page.js"], TEXTS["page.css"]


def content_type(name: str) -> str:
    kind = name.rpartition(".")[2]
    return f"text/{'javascript' if kind == 'js' else kind}; charset=utf-8"


async def load_nothing(folder: Path) -> Predictor:
    raise AssertionError


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.feed(TEXTS["index.html"])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value]


def test_its_files_are_served_and_are_all_there_is(app: ModelApp) -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(FILES)
    several = ModelRegistry(ServeConfig(), ("one", "two"), load_nothing)
    routes: dict[str, tuple[ASGIApp, str]] = {
        "index.html": (app, "/"),
        "page.css": (app, "/page.css"),
        "page.js": (app, "/page.js"),
    }
    routes |= {"models.html": (several, "/"), "models.js": (several, "/models.js")}
    routes |= {"docs.html": (app, "/docs"), "docs.js": (app, "/docs/docs.js")}
    assert call(several, "GET", "/page.css").text == STYLE
    for name in FILES:
        at, path = routes[name]
        response = call(at, "GET", path)
        assert (response.status_code, response.headers["content-type"]) == (200, content_type(name))
        assert response.text == TEXTS[name]
        expected_headers = serve_app.SWAGGER_HEADERS if name == "docs.html" else serve_app.PAGE_HEADERS
        assert {header: response.headers[header] for header in expected_headers} == expected_headers
    assert call(app, "GET", "/page.html").status_code == 404
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["serve"]
    assert all(any(fnmatch(f"page/{name}", pattern) for pattern in patterns) for name in FILES)


def test_it_asks_no_address_but_its_own() -> None:
    for name, text in TEXTS.items():
        assert not re.findall(r"https?:|url\(|@import|(?<![:/])//(?! )", text), f"{name} names another address"
    paths = re.findall(r"fetch\(([^,)]+)", SCRIPT)
    assert paths == ['"predict"', '"info"']
    tags = Tags()
    links = [value for _, names in tags.elements for name, value in names.items() if name in ("src", "href", "action")]
    assert links == ["page.css", "page.js", "../../"]
    assert re.findall(r"fetch\(([^,)]+)", TEXTS["models.js"]) == ['"v2/repository/index"']


def test_the_description_of_the_routes_needs_no_internet(app: ModelApp) -> None:
    page = call(app, "GET", "/docs").text
    names = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert names == ["data:,", "docs/swagger-ui.css", "docs/swagger-ui-bundle.js", "docs/docs.js"]
    for name in names[1:]:
        response = call(app, "GET", f"/{name}")
        assert response.status_code == 200
        assert response.headers["content-type"] == content_type(name)
    assert b"3.1" in call(app, "GET", "/docs/swagger-ui-bundle.js").content
    assert call(app, "GET", "/openapi.json").json()["openapi"].startswith("3.1")
    assert call(app, "GET", "/docs/favicon.png").status_code == 404


def test_its_policy_allows_what_it_does_and_nothing_else() -> None:
    policy = dict(part.strip().split(" ", 1) for part in serve_app.PAGE_HEADERS["content-security-policy"].split(";"))
    assert policy == {
        "default-src": "'none'",
        "style-src": "'self'",
        "script-src": "'self'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    for tag, names in Tags().elements:
        assert not [name for name in names if name == "style" or name.startswith("on")], f"<{tag}> has inline code"
    assert not re.findall(r"<style|<script(?! src)|<img|<iframe|<form[^>]* action", TEXTS["index.html"])


def test_nothing_is_written_as_markup() -> None:
    for script in (SCRIPT, TEXTS["models.js"]):
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|DOMParser", script)
    assert set(re.findall(r"setAttribute\(\"([\w-]+)", SCRIPT)) == {"role", "aria-label"}
    assert "localStorage" not in SCRIPT, "a key would stay on the machine"
