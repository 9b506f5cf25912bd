"""The configuration: `Recipe` says what is trained and is a run's identity, `Deploy` says where and how it runs.

Both are frozen pydantic models; a YAML file holds them together. The names below are what the other rooms use.
"""

from rtrain.config.data import (
    Augment as Augment,
    Data as Data,
)
from rtrain.config.deploy import (
    Cluster as Cluster,
    Deploy as Deploy,
    Range as Range,
    Serve as Serve,
    Tune as Tune,
)
from rtrain.config.loading import (
    DEPLOY_FIELDS as DEPLOY_FIELDS,
    RECIPE_FIELDS as RECIPE_FIELDS,
    Config as Config,
    assignment as assignment,
    dotted as dotted,
    dotted_names as dotted_names,
    flat as flat,
    load as load,
    parse as parse,
    parse_assignment as parse_assignment,
    put as put,
    recipe_names as recipe_names,
    recipe_text as recipe_text,
    to_document as to_document,
    to_yaml as to_yaml,
    with_overrides as with_overrides,
)
from rtrain.config.recipe import (
    BETAS as BETAS,
    DEFAULT_FREQUENCY as DEFAULT_FREQUENCY,
    LOCATION as LOCATION,
    SPEED as SPEED,
    Distill as Distill,
    Gate as Gate,
    Model as Model,
    Optim as Optim,
    Recipe as Recipe,
    Train as Train,
)
