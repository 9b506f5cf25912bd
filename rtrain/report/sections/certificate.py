"""The certificate of a drill: a run that was killed again and again ended like one that was never touched."""

from rtrain.report.collect import Collected
from rtrain.report.drawing.blocks import Section, Table


def section(run: Collected) -> Section | None:
    drills = run.of("drilled")
    if not drills:
        return None
    found = drills[-1]["certificate"]
    rows = [
        (
            fault["name"],
            fault["at_update"],
            fault["resumed_from"],
            fault["recomputed_updates"],
            f"{fault['seconds_to_next_update']:.1f}",
            "passed" if fault["passed"] else "FAILED",
        )
        for fault in found["faults"]
    ]
    intro = (
        f"{'Passed' if found['passed'] else 'FAILED'}: {len(rows)} faults in {found['updates']} updates of "
        f"{found['workers']} "
        f"workers. Compared with an undisturbed run: "
        f"{'the same weights, bit for bit' if found['weights_identical'] else 'OTHER WEIGHTS'}, "
        f"{'the same rows in the same order' if found['order_identical'] else 'OTHER ROWS'}; "
        f"{found['rows_lost']} rows lost, {found['rows_repeated']} repeated."
    )
    head = ("fault", "at", "from", "again", "seconds", "")
    note = (
        "At: the update of the fault; from: that of the checkpoint that the run went on from; again: updates that were "
        "computed a second time; seconds: from the fault to the first new update. "
        f"A checkpoint every {found['save_every']} updates: no more updates than lie between the fault and the newest "
        f"whole checkpoint may be computed again. The drill took {found['seconds']:.0f} s."
    )
    table = Table("Each fault, and from where the run went on", head, rows, note, wide=True)
    return Section("drill", "Drill certificate", intro, [table])
