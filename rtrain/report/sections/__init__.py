"""Sections of the report, in its order.

| module | content |
|---|---|
| `outcome` | scores and baselines, the worst mistakes |
| `next_steps` | recommendations |
| `answers` | scores with intervals, calibration, slices |
| `outputs` | blocks of `answers` by kind of output: labels, entities, questions, numbers |
| `data` | the rows: numbers, lengths, labels |
| `run_details` | curves, time by phase, cost, settings, versions |

A chart is drawn by a function of `rtrain.report.charts`, and shown by the section that calls it.
"""
