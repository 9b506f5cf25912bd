"""What a verb says where its library is not installed: which extra of rtrain has it."""

from collections.abc import Mapping, Sequence

SMALL: Mapping[str, tuple[str, frozenset[str]]] = {
    "predict": ("rows", frozenset({"pyarrow"})),
    "serve": ("serve", frozenset({"fastapi", "limits", "prometheus_client", "psutil", "pyarrow", "ray", "scipy"})),
    "serve --alone": ("alone", frozenset({"fastapi", "httptools", "limits", "prometheus_client", "uvicorn"})),
}
"""Verb -> an extra that is enough for it where one of these modules is lacking."""
ALONE = "--alone"
LARGE = "train"
MODULES = frozenset(
    {
        *("datasets", "fastapi", "httptools", "httpx", "huggingface_hub", "jinja2", "limits", "markupsafe", "nncf"),
        *(
            "prometheus_client",
            "psutil",
            "pyarrow",
            "ray",
            "rouge_score",
            "sacrebleu",
            "safetensors",
            "scipy",
            "sklearn",
        ),
        *("aiohttp", "pandas", "requests", "starlette", "torch", "transformers", "uvicorn"),
    }
)
"""Modules of the extra `train`, and of what comes with it."""
FLOAT = frozenset({"torch", "transformers", "safetensors"})


def said(words: Sequence[str], error: ModuleNotFoundError) -> str | None:
    """The line for a user who wrote `words`, a verb first; None where the module belongs to no extra, and its absence
    is a fault of the program."""
    verb = " ".join([*words[:1], *([ALONE] if ALONE in words else [])])
    module = (error.name or "").partition(".")[0]
    if module not in MODULES:
        return None
    extra, enough = SMALL.get(verb, (LARGE, MODULES))
    extra = extra if module in enough else LARGE
    other = "; an int8 artefact is answered without" if verb in SMALL and module in FLOAT else ""
    return f"rtrain {verb} needs {module}, which is not installed: pip install 'rtrain[{extra}]'{other}"
