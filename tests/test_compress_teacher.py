"""A teacher's answers: what its tasks reserve, and what is left of them where they fail. Without Ray."""

from rtrain.compress import teacher


def test_a_teacher_s_process_reserves_the_core_that_it_uses() -> None:
    """A private Ray on two cores says that it has six; a cluster's nodes have as many as they say."""
    assert teacher.logical_cpus([6.0], cores=2) == 3.0
    assert teacher.logical_cpus([2.0], cores=2) == 1.0
    assert teacher.logical_cpus([0.5], cores=2) == 1.0
    # A driver of two cores on a head that gives none, and nodes of 64: 32 for each process, before.
    assert teacher.logical_cpus([0.0, 64.0, 64.0], cores=2) == 1.0
    assert teacher.logical_cpus([2.0, 64.0], cores=2) == 1.0
