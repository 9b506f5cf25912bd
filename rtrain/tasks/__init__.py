"""Tasks: how rows are encoded, the loss, and how outputs are decoded. `rtrain.config.recipe.TASKS` lists them."""
