"""Instance types of the clouds: resources and approximate hourly prices.

Prices are on-demand list prices for Linux in dollars: AWS us-west-2, Google us-central1, Azure westus2. They change,
and are no invoice.
"""

from typing import NamedTuple


class InstanceType(NamedTuple):
    cloud: str
    name: str
    cpus: int
    memory_gb: float
    dollars_per_hour: float
    """On-demand price per hour."""
    gpu: str | None = None
    gpus: int = 0
    efa_interfaces: int = 0
    """AWS Elastic Fabric Adapter cards; 0 if the type supports none."""


INSTANCES = (
    InstanceType("aws", "m7i.large", 2, 8, 0.101),
    InstanceType("aws", "m7i.xlarge", 4, 16, 0.202),
    InstanceType("aws", "m7i.2xlarge", 8, 32, 0.403),
    InstanceType("aws", "c7i.xlarge", 4, 8, 0.179),
    InstanceType("aws", "c7i.2xlarge", 8, 16, 0.357),
    InstanceType("aws", "c7i.4xlarge", 16, 32, 0.714),
    InstanceType("aws", "c7i.8xlarge", 32, 64, 1.428),
    InstanceType("aws", "g4dn.2xlarge", 8, 32, 0.752, "T4", 1),
    InstanceType("aws", "g4dn.8xlarge", 32, 128, 2.176, "T4", 1, efa_interfaces=1),
    InstanceType("aws", "g5.2xlarge", 8, 32, 1.212, "A10G", 1),
    InstanceType("aws", "g5.8xlarge", 32, 128, 2.448, "A10G", 1, efa_interfaces=1),
    InstanceType("aws", "g6.2xlarge", 8, 32, 0.978, "L4", 1),
    InstanceType("aws", "g6.8xlarge", 32, 128, 2.014, "L4", 1, efa_interfaces=1),
    InstanceType("aws", "g6e.2xlarge", 8, 64, 2.242, "L40S", 1),
    InstanceType("aws", "g6e.8xlarge", 32, 256, 4.529, "L40S", 1, efa_interfaces=1),
    InstanceType("aws", "p4d.24xlarge", 96, 1152, 21.958, "A100", 8, efa_interfaces=4),
    InstanceType("aws", "p5.48xlarge", 192, 2048, 55.04, "H100", 8, efa_interfaces=32),
    InstanceType("gcp", "n2-standard-2", 2, 8, 0.097),
    InstanceType("gcp", "n2-standard-8", 8, 32, 0.388),
    InstanceType("gcp", "g2-standard-8", 8, 32, 0.854, "L4", 1),
    InstanceType("gcp", "a2-highgpu-1g", 12, 85, 3.673, "A100", 1),
    InstanceType("azure", "Standard_D2s_v5", 2, 8, 0.096),
    InstanceType("azure", "Standard_F8s_v2", 8, 16, 0.338),
    InstanceType("azure", "Standard_NC8as_T4_v3", 8, 56, 0.752, "T4", 1),
    InstanceType("azure", "Standard_NC24ads_A100_v4", 24, 220, 3.673, "A100", 1),
)
INSTANCES_BY_NAME = {instance.name: instance for instance in INSTANCES}


def find_instance_with_gpu(cloud: str, gpu: str) -> InstanceType | None:
    """The first instance type of a cloud with the GPU."""
    return next((instance for instance in INSTANCES if instance.cloud == cloud and instance.gpu == gpu), None)


def list_gpus(cloud: str) -> list[str]:
    """GPU models of a cloud's instance types."""
    return sorted({instance.gpu for instance in INSTANCES if instance.cloud == cloud and instance.gpu})
