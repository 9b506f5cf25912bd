"""`rtrain cluster rehearse`: a cluster file tried on one machine, with faults, before anything is paid for."""
