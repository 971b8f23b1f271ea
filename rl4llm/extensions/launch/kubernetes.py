"""Kubernetes: an indexed Job for the trainer, StatefulSets for servers, and a Service that gives each pod a name.

Options: `image`, which contains `rl4llm` and, for servers, SGLang; `claim`, a PersistentVolumeClaim that many pods can
write to (ReadWriteMany), mounted at `shared` (``/shared``), which contains output.dir and the model; `namespace`;
`secret`, the Secret with the keys of the run (default: the job's name); `cpu` and `memory`, what each pod requests (default:
8 processors for each GPU or 4 without, and 8 GiB for each). No file contains the values of keys.
"""

from __future__ import annotations

from typing import Any

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.launch.job import ClusterJob
from rl4llm.extensions.launch.roles import NUMBER, Role, hosts_variable
from rl4llm.extensions.launch.yaml_text import yaml_of

MANIFEST = "job.yaml"
OPTIONS = ("image", "claim", "shared", "namespace", "secret", "cpu", "memory")
CONFIG = "/etc/rl4llm/config.yaml"
GRACE_S = 120  # to finish the current step and save a checkpoint
MEMORY_FOR_RANKS = "/dev/shm"


def render(job: ClusterJob, config: str) -> dict[str, str]:
    """Return the objects in one file. `config` is the text of the configuration, stored in a ConfigMap."""
    job.check_options(OPTIONS, "kubernetes")
    missing = [name for name in ("image", "claim") if not job.option(name)]
    if missing:
        raise ConfigError(f"--on kubernetes needs --option {missing[0]}=NAME. Options: {', '.join(OPTIONS)}.")
    items = [_object(job, "ConfigMap", "v1", "config", {"data": {"config.yaml": config}})]
    for role in job.roles:
        items += [_service(job, role), _trainer(job, role) if role.name == "trainer" else _serving(job, role)]
    return {MANIFEST: yaml_of(items)}


def submit(job: ClusterJob) -> list[str]:
    return ["kubectl", "apply", "-f", MANIFEST]


def hosts(job: ClusterJob, role: Role) -> list[str]:
    """Return the host names of the pods of a role."""
    return [f"{job.name}-{role.name}-{number}.{job.name}-{role.name}" for number in range(role.count)]


def _object(job: ClusterJob, kind: str, version: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
    place = {"namespace": job.option("namespace")} if job.option("namespace") else {}
    metadata = {"name": f"{job.name}-{name}", **place, "labels": {"app": job.name, "role": name}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}


def _service(job: ClusterJob, role: Role) -> dict[str, Any]:
    """Return a headless Service, which gives names also to pods that are still starting."""
    chosen = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"app": job.name, "role": role.name},
    }
    ports = [{"name": f"p{role.port(number)}", "port": role.port(number)} for number in range(role.count)]
    return _object(job, "Service", "v1", role.name, {"spec": {**chosen, "ports": ports}})


def _trainer(job: ClusterJob, role: Role) -> dict[str, Any]:
    counts = {
        "completionMode": "Indexed",
        "completions": role.count,
        "parallelism": role.count,
        "backoffLimit": 3,
    }
    body = {
        "spec": {
            **counts,
            "template": _pod(job, role, "batch.kubernetes.io/job-completion-index", "OnFailure"),
        }
    }
    return _object(job, "Job", "batch/v1", role.name, body)


def _serving(job: ClusterJob, role: Role) -> dict[str, Any]:
    name, labels = f"{job.name}-{role.name}", {"app": job.name, "role": role.name}
    spec = {"replicas": role.count, "serviceName": name, "podManagementPolicy": "Parallel"}
    template = _pod(job, role, "apps.kubernetes.io/pod-index", "Always")
    body = {"spec": {**spec, "selector": {"matchLabels": labels}, "template": template}}
    return _object(job, "StatefulSet", "apps/v1", role.name, body)


def _pod(job: ClusterJob, role: Role, number: str, restarts: str) -> dict[str, Any]:
    """Return a pod's template; Kubernetes sets its number as a label."""
    shared = job.option("shared", "/shared")
    known = [
        {"name": hosts_variable(other.name), "value": ",".join(hosts(job, other))} for other in job.roles
    ]
    field = {"fieldRef": {"fieldPath": f"metadata.labels['{number}']"}}
    secret = {"secretKeyRef": {"name": job.option("secret", job.name)}}
    keys = [
        {"name": name, "valueFrom": {"secretKeyRef": secret["secretKeyRef"] | {"key": name}}}
        for name in role.secrets
    ]
    mounts = {
        "config": CONFIG.rpartition("/")[0],
        "memory": MEMORY_FOR_RANKS,
        **({"shared": shared} if role.shared else {}),
    }
    volumes = {
        "config": {"configMap": {"name": f"{job.name}-config"}},
        "memory": {"emptyDir": {"medium": "Memory"}},
        "shared": {"persistentVolumeClaim": {"claimName": job.option("claim")}},
    }
    container = {
        "name": role.name,
        "image": job.option("image"),
        "command": list(role.command),
        "env": [{"name": NUMBER, "valueFrom": field}, *known, *keys],
        "ports": [{"containerPort": role.port(number)} for number in range(role.count)],
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
        **({"workingDir": shared} if role.shared else {}),
        "resources": {
            "requests": {
                "cpu": job.option("cpu", str(role.cpus)),
                "memory": job.option("memory", f"{role.memory_gib}Gi"),
            },
            **({"limits": {"nvidia.com/gpu": role.gpus}} if role.gpus else {}),
        },
    }
    spec = {
        "restartPolicy": restarts,
        "terminationGracePeriodSeconds": GRACE_S,
        "subdomain": f"{job.name}-{role.name}",
        **({"nodeSelector": {"nvidia.com/gpu.product": role.gpu}} if role.gpu else {}),
        "containers": [container],
        "volumes": [{"name": name, **volumes[name]} for name in mounts],
    }
    return {"metadata": {"labels": {"app": job.name, "role": role.name}}, "spec": spec}
