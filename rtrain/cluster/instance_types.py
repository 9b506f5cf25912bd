"""Machines that a cluster may be made of: what they have, and roughly what an hour of them costs.

Prices are those listed for Linux on demand, in dollars: AWS in us-west-2, Google in us-central1, Azure in westus2. They
change: they tell a cent from ten dollars, and are no invoice.
"""

from typing import NamedTuple


class Instance(NamedTuple):
    cloud: str
    name: str
    cpus: int
    memory_gb: float
    dollars: float
    """An hour, on demand."""
    gpu: str | None = None
    gpus: int = 0
    efa: int = 0
    """Network cards of AWS's Elastic Fabric Adapter; 0 where the instance takes none."""


INSTANCES = (
    Instance("aws", "m7i.large", 2, 8, 0.101),
    Instance("aws", "m7i.xlarge", 4, 16, 0.202),
    Instance("aws", "m7i.2xlarge", 8, 32, 0.403),
    Instance("aws", "c7i.xlarge", 4, 8, 0.179),
    Instance("aws", "c7i.2xlarge", 8, 16, 0.357),
    Instance("aws", "c7i.4xlarge", 16, 32, 0.714),
    Instance("aws", "c7i.8xlarge", 32, 64, 1.428),
    Instance("aws", "g4dn.2xlarge", 8, 32, 0.752, "T4", 1),
    Instance("aws", "g4dn.8xlarge", 32, 128, 2.176, "T4", 1, efa=1),
    Instance("aws", "g5.2xlarge", 8, 32, 1.212, "A10G", 1),
    Instance("aws", "g5.8xlarge", 32, 128, 2.448, "A10G", 1, efa=1),
    Instance("aws", "g6.2xlarge", 8, 32, 0.978, "L4", 1),
    Instance("aws", "g6.8xlarge", 32, 128, 2.014, "L4", 1, efa=1),
    Instance("aws", "g6e.2xlarge", 8, 64, 2.242, "L40S", 1),
    Instance("aws", "g6e.8xlarge", 32, 256, 4.529, "L40S", 1, efa=1),
    Instance("aws", "p4d.24xlarge", 96, 1152, 21.958, "A100", 8, efa=4),
    Instance("aws", "p5.48xlarge", 192, 2048, 55.04, "H100", 8, efa=32),
    Instance("gcp", "n2-standard-2", 2, 8, 0.097),
    Instance("gcp", "n2-standard-8", 8, 32, 0.388),
    Instance("gcp", "g2-standard-8", 8, 32, 0.854, "L4", 1),
    Instance("gcp", "a2-highgpu-1g", 12, 85, 3.673, "A100", 1),
    Instance("azure", "Standard_D2s_v5", 2, 8, 0.096),
    Instance("azure", "Standard_F8s_v2", 8, 16, 0.338),
    Instance("azure", "Standard_NC8as_T4_v3", 8, 56, 0.752, "T4", 1),
    Instance("azure", "Standard_NC24ads_A100_v4", 24, 220, 3.673, "A100", 1),
)
BY_NAME = {instance.name: instance for instance in INSTANCES}


def with_gpu(cloud: str, gpu: str) -> Instance | None:
    """The first machine of a cloud with such a GPU."""
    return next((one for one in INSTANCES if one.cloud == cloud and one.gpu == gpu), None)


def gpus(cloud: str) -> list[str]:
    """Kinds of GPU that a cloud's machines in the table have."""
    return sorted({one.gpu for one in INSTANCES if one.cloud == cloud and one.gpu})
