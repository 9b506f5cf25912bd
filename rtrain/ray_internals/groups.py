"""Worker groups of Ray Train, and the trials of Ray Tune that start them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback
    from ray.tune.callback import Callback as TuneCallback
    from ray.util.placement_group import PlacementGroup

    from rtrain.ray_internals.torch_group import TorchConfig


def make_group_start_callback(on_start: Callable[[str], None]) -> "WorkerGroupCallback":
    """Make a callback of Ray Train that calls `on_start` with the id (hex) of the workers' placement group."""
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback

    class GroupStartCallback(WorkerGroupCallback):
        def after_worker_group_start(self, worker_group: Any) -> None:
            on_start(worker_group.get_worker_group_state().placement_group_handle.placement_group.id.hex())

    return GroupStartCallback()


def get_placement_group(group_id: str) -> "PlacementGroup":
    """Return the placement group of an id in hex."""
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    return PlacementGroup(PlacementGroupID.from_hex(group_id))


def make_trainer_class(requests_resources: bool = True) -> type[Any]:
    """Make a subclass of Ray Train's TorchTrainer, for a config of `make_torch_config`, without three behaviors; and,
    if not `requests_resources`, without a fourth: requests to an autoscaler for its workers.

    It sets no handler for Ctrl-C: Ray's own handler would end this process with SystemExit, and remain after `fit`. (A
    `fit` in another thread sets no handler either, but the session then ends while that thread is still inside Ray's
    core, which ended one interrupted search with a segmentation fault.) It starts no process for the data sets of a
    Trainer: workers read their own streams. It starts no process that frees the CPUs of a dead controller:
    `rtrain.runs.worker_pool` frees them. Without a dashboard, as in a private session, that process delayed the end
    of every training shorter than 12 s to 12 s.
    """
    from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

    from rtrain.ray_internals import torch_group

    disabled_callbacks = (DatasetsCallback, PlacementGroupCleanerCallback)
    base_trainer: Any = torch_group.import_torch_trainer()

    class Trainer(base_trainer):  # type: ignore[misc]
        def __init__(self, train_loop_per_worker: Callable[[], None], *, torch_config: Any, **kwargs: Any):
            # Ray's own constructor imports its own configuration, and so torch, only to choose the backend.
            super(base_trainer, self).__init__(train_loop_per_worker, backend_config=torch_config, **kwargs)

        def _register_sigint_handler(self, controller: Any) -> None:
            pass

        def _create_default_callbacks(self) -> list[Any]:
            callbacks = super()._create_default_callbacks()
            return [callback for callback in callbacks if not isinstance(callback, disabled_callbacks)]

        def _initialize_and_run_controller(self, **kwargs: Any) -> Any:
            if not requests_resources:
                kwargs["scaling_policy"] = _make_silent_policy(self.scaling_config)
            return super()._initialize_and_run_controller(**kwargs)

    return Trainer


def make_torch_config(backend: str, timeout_s: int) -> "TorchConfig":
    """Make the configuration of the process group: `gloo` or `nccl`; a collective beyond `timeout_s` fails."""
    from rtrain.ray_internals import torch_group

    return torch_group.TorchConfig(backend, timeout_s)


def _make_silent_policy(scaling: Any) -> Any:
    """Make Ray Train's scaling policy for a fixed number of workers, without its resource requests."""
    from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy

    class SilentScalingPolicy(FixedScalingPolicy):
        def _send_resource_request(self) -> None:
            pass

        _maybe_send_resource_request = _cancel_resource_request = _send_resource_request

    return SilentScalingPolicy(scaling)


def make_silent_progress() -> "TuneCallback":
    """Make a callback that replaces Ray Tune's own, which prints a line at the end of each trial, whatever the
    verbosity."""
    from ray.tune.progress_reporter import TrialProgressCallback

    class SilentProgressCallback(TrialProgressCallback):
        def log_result(self, trial: Any, result: dict[str, Any], error: bool = False) -> None:
            pass

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            pass

    return SilentProgressCallback()
