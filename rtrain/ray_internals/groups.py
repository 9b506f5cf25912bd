"""Worker groups of Ray Train, and the trials of Ray Tune that start them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback
    from ray.tune.callback import Callback as TuneCallback
    from ray.util.placement_group import PlacementGroup

    from rtrain.ray_internals.torch_group import TorchConfig


def on_group_start(tell: Callable[[str], None]) -> "WorkerGroupCallback":
    """A callback of Ray Train's that tells the id, in hex, of the placement group that the workers hold."""
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback

    class Started(WorkerGroupCallback):
        def after_worker_group_start(self, worker_group: Any) -> None:
            tell(worker_group.get_worker_group_state().placement_group_handle.placement_group.id.hex())

    return Started()


def placement_group(identity: str) -> "PlacementGroup":
    """The placement group of that id, in hex."""
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    return PlacementGroup(PlacementGroupID.from_hex(identity))


def torch_trainer(asks: bool = True) -> type[Any]:
    """Ray Train's TorchTrainer, for a `torch_config` of ours, without three habits of it; and, where it `asks` not,
    without a fourth, to ask an autoscaler for its workers.

    It leaves Ctrl-C to this process: Ray's own handler would end it with SystemExit, and stay behind after `fit`. (A
    `fit` in a side thread sets no handler either, but the session then ends while that thread is still inside Ray's
    core, which ended one interrupted search with a segmentation fault.) And it starts no process for the data sets of a
    Trainer: workers read their own streams. Nor does it start a process that frees the CPUs of a dead controller, which
    `runs.placement` does: where there is no dashboard to ask, as in a private session, that process made the end of
    every training shorter than 12 s wait for 12 s.
    """
    from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

    from rtrain.ray_internals import torch_group

    unwanted = (DatasetsCallback, PlacementGroupCleanerCallback)
    stock: Any = torch_group.stock_trainer()

    class Trainer(stock):  # type: ignore[misc]
        def __init__(self, train_loop_per_worker: Callable[[], None], *, torch_config: Any, **given: Any):
            # Ray's own imports its own configuration, and so torch, to choose what ours says.
            super(stock, self).__init__(train_loop_per_worker, backend_config=torch_config, **given)

        def _register_sigint_handler(self, controller: Any) -> None:
            pass

        def _create_default_callbacks(self) -> list[Any]:
            found = super()._create_default_callbacks()
            return [callback for callback in found if not isinstance(callback, unwanted)]

        def _initialize_and_run_controller(self, **given: Any) -> Any:
            if not asks:
                given["scaling_policy"] = _silent_policy(self.scaling_config)
            return super()._initialize_and_run_controller(**given)

    return Trainer


def torch_config(backend: str, timeout_s: int) -> "TorchConfig":
    """How workers join into a process group: by `gloo` or `nccl`; an exchange that takes longer fails."""
    from rtrain.ray_internals import torch_group

    return torch_group.TorchConfig(backend, timeout_s)


def _silent_policy(scaling: Any) -> Any:
    """Ray Train's rule for a fixed number of workers, without its requests for them."""
    from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy

    class Silent(FixedScalingPolicy):
        def _send_resource_request(self) -> None:
            pass

        _maybe_send_resource_request = _cancel_resource_request = _send_resource_request

    return Silent(scaling)


def silent_progress() -> "TuneCallback":
    """A callback of Ray Tune's that takes the place of its own, which prints a line at the end of each of its trials,
    however little it was told to print."""
    from ray.tune.progress_reporter import TrialProgressCallback

    class Silent(TrialProgressCallback):
        def log_result(self, trial: Any, result: dict[str, Any], error: bool = False) -> None:
            pass

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            pass

    return Silent()
