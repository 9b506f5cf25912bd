"""The programs that the endpoint is measured against, each as its own documentation shows it, on one port.

python -m benchmarks.serve.peers uvicorn|pipeline|stock ARTIFACT PORT

uvicorn   FastAPI on uvicorn, and rtrain's own engine called once for each request: no batches, no checks, no Ray
pipeline  FastAPI on uvicorn, and the text-classification pipeline of Transformers: what most teams write first
stock     Ray Serve by default: FastAPI in a deployment of one replica, and rtrain's own engine
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

THREADS = 1
"""Threads of every engine, as `rtrain serve` has."""


def engine(artifact: Path) -> Callable[[str], Any]:
    from rtrain.inference.predictor import Predictor

    predictor = Predictor.load(artifact, threads=THREADS)
    return lambda text: predictor([text], {"top_k": 1})


def pipeline(artifact: Path) -> Callable[[str], Any]:
    """The artifact's encoder with a classifier of the same size. Its weights are random, since only its time counts:
    Transformers refuses artifacts of mean pooling."""
    import torch
    import transformers

    from rtrain.inference import artifact as artifacts

    torch.set_num_threads(THREADS)
    labels = len(artifacts.read_artifact(artifact).labels)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(
        artifact, num_labels=labels, ignore_mismatched_sizes=True, trust_remote_code=False
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(artifact, trust_remote_code=False)
    options = {"model": network.eval(), "tokenizer": tokenizer, "device": "cpu"}
    answer = transformers.pipeline("text-classification", **options, trust_remote_code=False)
    return lambda text: answer(text)


def application(answer: Callable[[str], Any]) -> Any:
    """An endpoint that runs on a thread per request, as FastAPI does for functions that are not async."""
    import fastapi
    import pydantic

    class PredictRequest(pydantic.BaseModel):
        inputs: str

    app = fastapi.FastAPI()

    def predict(request: PredictRequest) -> Any:
        return answer(request.inputs)

    app.post("/predict")(predict)
    return app


def stock(artifact: Path, port: int) -> None:
    import fastapi
    import pydantic
    import ray
    from ray import serve

    class PredictRequest(pydantic.BaseModel):
        inputs: str

    app = fastapi.FastAPI()

    @serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1024)
    @serve.ingress(app)
    class Model:
        def __init__(self) -> None:
            self.answer = engine(artifact)

        @app.post("/predict")
        def predict(self, request: PredictRequest) -> Any:
            return self.answer(request.inputs)

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Model.bind(), blocking=True)  # type: ignore[attr-defined]


def main() -> None:
    kind, artifact, port = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if kind == "stock":
        stock(artifact, port)
        return
    import uvicorn

    answer = {"uvicorn": engine, "pipeline": pipeline}[kind](artifact)
    uvicorn.run(application(answer), host="127.0.0.1", port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
