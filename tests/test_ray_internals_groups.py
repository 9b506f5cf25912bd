"""Ray Train and Ray Tune: the private names of worker groups still exist and mean the same."""

import inspect
from typing import Any

from rtrain import ray_internals
from rtrain.ray_internals import groups


def test_the_trainer_s_two_habits_are_still_methods_that_it_calls() -> None:
    import ray.train.torch

    made, stock = ray_internals.torch_trainer(), ray.train.torch.TorchTrainer
    assert issubclass(made, stock)
    source = "".join(inspect.getsource(base) for base in stock.__mro__[:-1] if base.__module__.startswith("ray.train"))
    for name in ("_register_sigint_handler", "_create_default_callbacks"):
        assert f"self.{name}(" in source
        assert list(inspect.signature(getattr(made, name)).parameters) == list(
            inspect.signature(getattr(stock, name)).parameters
        )


def test_workers_for_whom_a_run_asks_are_not_asked_for_by_ray_train() -> None:
    from ray.train import ScalingConfig
    from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy, scaling_policy

    silent: Any = groups._silent_policy(ScalingConfig(num_workers=2))
    assert isinstance(silent, FixedScalingPolicy)
    source = inspect.getsource(scaling_policy) + inspect.getsource(FixedScalingPolicy)
    for name in ("_send_resource_request", "_maybe_send_resource_request", "_cancel_resource_request"):
        assert f"self.{name}()" in source
        getattr(silent, name)()  # Ray's own would need a coordinator
    decision: Any = silent.make_decision_for_non_running_worker_group()
    assert decision.num_workers == 2
    assert "scaling_policy=create_scaling_policy(" in inspect.getsource(ray_internals.torch_trainer().fit)


def test_a_group_s_start_is_told_to_callbacks() -> None:
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback
    from ray.train.v2._internal.execution.worker_group.state import WorkerGroupState

    told: list[str] = []
    made = ray_internals.on_group_start(told.append)
    assert isinstance(made, WorkerGroupCallback)
    assert "after_worker_group_start" in vars(WorkerGroupCallback)
    assert "placement_group_handle" in inspect.signature(WorkerGroupState).parameters


def test_tune_prints_through_the_callback_that_is_replaced() -> None:
    """Tune adds its own unless it is given one of that class."""
    from ray.tune.progress_reporter import TrialProgressCallback
    from ray.tune.utils.callback import _create_default_callbacks

    made = ray_internals.silent_progress()
    assert isinstance(made, TrialProgressCallback)
    found = _create_default_callbacks([made], air_verbosity=None)
    assert [one for one in found if isinstance(one, TrialProgressCallback)] == [made]
    assert {"log_result", "on_trial_complete"} <= vars(TrialProgressCallback).keys()


def test_the_callbacks_that_are_left_out_are_among_ray_s_own() -> None:
    from ray.train.torch import TorchTrainer
    from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

    kinds: list[Any] = [TorchTrainer, ray_internals.torch_trainer()]
    stock, made = ({type(one) for one in kind(lambda: None)._create_default_callbacks()} for kind in kinds)
    assert stock - made == {DatasetsCallback, PlacementGroupCleanerCallback}
    assert made < stock
