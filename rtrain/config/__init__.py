"""The configuration: `Recipe`, the settings that identify a run, and `DeployConfig`, where and how it runs.

Both are frozen pydantic models; one YAML file holds them. Other packages import the names below.
"""

from rtrain.config.data import AugmentConfig as AugmentConfig, DataConfig as DataConfig
from rtrain.config.deploy import (
    ClusterConfig as ClusterConfig,
    DeployConfig as DeployConfig,
    ServeConfig as ServeConfig,
)
from rtrain.config.loading import (
    DEPLOY_FIELDS as DEPLOY_FIELDS,
    RECIPE_FIELDS as RECIPE_FIELDS,
    Config as Config,
    flatten_config as flatten_config,
    flatten_document as flatten_document,
    format_assignment as format_assignment,
    iter_setting_names as iter_setting_names,
    list_recipe_names as list_recipe_names,
    load_config as load_config,
    parse_assignment as parse_assignment,
    parse_config as parse_config,
    read_recipe_text as read_recipe_text,
    set_setting as set_setting,
    to_document as to_document,
    to_yaml as to_yaml,
    with_overrides as with_overrides,
)
from rtrain.config.recipe import (
    ADAM_BETAS as ADAM_BETAS,
    DEFAULT_AGGREGATION_FREQUENCY as DEFAULT_AGGREGATION_FREQUENCY,
    LOCATION_SETTINGS as LOCATION_SETTINGS,
    SPEED_SETTINGS as SPEED_SETTINGS,
    DistillConfig as DistillConfig,
    GateConfig as GateConfig,
    ModelConfig as ModelConfig,
    OptimConfig as OptimConfig,
    Recipe as Recipe,
    TrainConfig as TrainConfig,
)
from rtrain.config.selection import MetricsConfig as MetricsConfig
from rtrain.config.tune import Range as Range, TuneConfig as TuneConfig
