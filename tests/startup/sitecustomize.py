"""Python processes that start sooner. With this folder on PYTHONPATH every one of them reads it when it starts.

The tests start hundreds of processes that import torch, transformers and Ray, and Python looks for garbage in the
millions of objects of these imports every 700 objects: a fifth of the processor time of a start.
"""

import gc

gc.set_threshold(100_000, 20, 100)
