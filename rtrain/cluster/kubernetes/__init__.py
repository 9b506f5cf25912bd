"""KubeRay manifests and their rules."""
