"""Other ways to train the same model on the same rows. Each is a program as a user would write it.

All take the options of `common.parser`, and write their measurements to `--out`. None imports rtrain's training, except
`ddp_loop`, which reads rtrain's batches from its token store.
"""
