"""The image of the pods, as a Dockerfile."""

import sys
from pathlib import Path

import jinja2

from rtrain.cluster.variants.variants import RAY


def dockerfile(gpu: bool = False) -> str:
    """For the Python that runs here, so that both ends of a job have the same. With `gpu` torch comes with CUDA."""
    source = (Path(__file__).parent / "Dockerfile.j2").read_text(encoding="utf-8")
    template = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, autoescape=False).from_string(source)
    return template.render(ray=RAY, python=f"{sys.version_info.major}.{sys.version_info.minor}", gpu=gpu)
