"""The sampler of `rtrain tune` as a searcher of Ray Tune."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.tune.search import Searcher
from ray.tune.search.sample import Categorical, Domain, Float, Integer, LogUniform, Uniform

from rtrain.core.errors import ConfigError, Problem
from tune import sampler as samplers
from tune.sampler import Observation
from tune.space import Dimension, is_finite, is_number

SAMPLERS = ("auto", "gp", "tpe", "random", "grid")
DOMAINS_HINT = "write uniform, loguniform, randint, lograndint or choice, by the dotted name of a setting"


class OptunaAskSearch(Searcher):
    """Proposes settings as `rtrain tune` does, without its trial 0: quasi-random points first, then those of a Gaussian
    process or of Parzen estimators, by Optuna's ask.

    Metric, mode and space are those of the Tuner. Trials are compared at their first result, where they have equally
    many rows. Floats get three significant digits. `sampler` is one of `tune.sampler`: `ConfigError` is raised for
    another one, or if Optuna is not installed. Tune asks for a trial while others train, which count as the worst.
    """

    def __init__(self, points_to_evaluate: Sequence[Mapping[str, Any]] = (), seed: int = 0, sampler: str = "auto"):
        super().__init__("score", "max")
        if sampler not in SAMPLERS:
            fix = f"write one of {', '.join(SAMPLERS)}"
            raise ConfigError([Problem("sampler", sampler, "no sampler has this name", fix, code="unknown_name")])
        samplers.check_sampler(sampler)
        self._options: dict[str, Any] = {"seed": seed, "sampler": sampler, "planned_trials": 1}
        self._points_to_evaluate = list(points_to_evaluate)
        """Settings to try first; the sampler completes them."""
        self._dimensions: tuple[Dimension, ...] = ()
        self._points: dict[str, dict[str, Any]] = {}
        """Proposed settings by trial id."""
        self._values: dict[str, float | None] = {}
        """Value at the first result by trial id, larger is better; None if the trial failed."""

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        """Take the Tuner's metric, mode and space. Raises `ConfigError` for a space that it cannot search."""
        self._metric, self._mode = metric or self._metric, mode or self._mode
        self._dimensions = build_dimensions(config, self._options["sampler"])
        self._options["planned_trials"] = max(1, spec.get("num_samples", 1))
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Return the settings of the next trial; `FINISHED` if all points of the space were tried."""
        number, observations = len(self._points), [self._observe(known_id) for known_id in self._points]
        proposal = samplers.propose(self._dimensions, observations, number=number, **self._options)
        if proposal is None:
            return self.FINISHED  # type: ignore[return-value]  # Tune's word for the end
        self._points[trial_id] = {**proposal[0], **next(iter(self._points_to_evaluate[number:]), {})}
        return dict(self._points[trial_id])

    def _observe(self, trial_id: str) -> Observation:
        point = self._points[trial_id]
        is_inside = all(dimension.to_unit(point.get(dimension.name)) is not None for dimension in self._dimensions)
        return Observation(point if is_inside else None, self._values.get(trial_id), trial_id not in self._values)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if result["training_iteration"] == 1:
            self._values[trial_id] = float(result[str(self._metric)]) * (-1 if self._mode == "min" else 1)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if error:
            self._values[trial_id] = None
        elif result:
            self.on_trial_result(trial_id, result)

    def save(self, checkpoint_path: str) -> None:
        """Write the state as JSON; Tune calls it."""
        Path(checkpoint_path).write_text(json.dumps([self._points, self._values]), encoding="utf-8")

    def restore(self, checkpoint_path: str) -> None:
        self._points, self._values = json.loads(Path(checkpoint_path).read_text(encoding="utf-8"))


def build_dimensions(param_space: Mapping[str, Any], sampler: str = "auto") -> tuple[Dimension, ...]:
    """Build the dimensions of a `param_space` of Ray Tune, without its constants. Raises one `ConfigError` with all
    problems: unsupported domains, a space without domains, a grid with ranges."""
    domains = {name: value for name, value in param_space.items() if isinstance(value, Domain | dict)}
    dimensions = {name: _make_dimension(name, domain) for name, domain in domains.items()}
    problems = [
        Problem(f"param_space.{name}", None, "this domain is not supported", DOMAINS_HINT, code="unsupported")
        for name, dimension in dimensions.items()
        if dimension is None
    ]
    supported = tuple(dimension for dimension in dimensions.values() if dimension is not None)
    if not domains:
        problems.append(Problem("param_space", None, "it has no domain", DOMAINS_HINT, code="empty_space"))
    if sampler == "grid" and not is_finite(supported):
        problems.append(Problem("sampler", "grid", "it has no ranges", "write choice", code="conflicting_settings"))
    if problems:
        raise ConfigError(problems)
    return supported


def _make_dimension(name: str, domain: Domain | dict[str, Any]) -> Dimension | None:
    """Return the dimension of a domain; None if it is not supported."""
    sampler = domain.get_sampler() if isinstance(domain, Domain) else None
    if isinstance(domain, Categorical) and isinstance(sampler, Uniform):
        choices = domain.categories
        return Dimension(name, choices=tuple(sorted(choices) if all(map(is_number, choices)) else choices))
    if not isinstance(domain, Float | Integer) or not isinstance(sampler, Uniform | LogUniform):
        return None
    high = domain.upper - 1 if isinstance(domain, Integer) else domain.upper  # Tune excludes the bound of integers
    return Dimension(name, domain.lower, high, log=isinstance(sampler, LogUniform))
