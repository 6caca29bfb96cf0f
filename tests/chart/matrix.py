"""Values that the chart has to render: from the least to every option on."""

from typing import Any

from tests.chart.rendering import SIMULATED, Values, merged

HUB: Values = {"models": {"qwen3": {"source": {"huggingFace": {"id": "Qwen/Qwen3-30B-A3B"}}}}}
LONG = "a-release-with-a-name-as-long-as-helm-allows-for-oneeee"[:53]

_PODS: dict[str, Any] = {
    "podAnnotations": {"example.com/a": "b"},
    "podLabels": {"example.com/team": "a"},
    "nodeSelector": {"example.com/pool": "a"},
    "tolerations": [{"key": "example.com/dedicated", "operator": "Exists"}],
    "priorityClassName": "high",
    "schedulerName": "other-scheduler",
    "extraEnv": [{"name": "A", "value": "b"}],
    "envFrom": [{"secretRef": {"name": "env"}}],
    "extraVolumes": [{"name": "extra", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
    "initContainers": [{"name": "first", "image": "busybox:1", "command": ["true"]}],
    "serviceAccount": {"create": True, "name": "", "annotations": {"example.com/role": "a"}},
    "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
}
_NODES = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}
_MONITOR = {
    "enabled": True,
    "additionalLabels": {"release": "prometheus"},
    "scrapeTimeout": "5s",
    "relabelings": [{"action": "drop", "sourceLabels": ["a"], "regex": "b"}],
    "metricRelabelings": [{"action": "drop", "sourceLabels": ["a"], "regex": "b"}],
}

EVERYTHING: Values = {
    "imageRegistry": "registry.example.com/team",
    "imagePullSecrets": [{"name": "registry"}],
    "commonLabels": {"example.com/owner": "a"},
    "worker": {
        **_PODS,
        "runtimeClassName": "nvidia",
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": _NODES}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "keda": {"enabled": True},
        "extraArgs": ["--max-running=8"],
    },
    "gateway": {
        **_PODS,
        "apiKeys": {"secretName": "keys"},
        "tls": {"secretName": "certificate"},
        "autoscaling": {"enabled": True},
        "image": {"digest": "sha256:" + "0" * 64},
        "affinity": {"podAntiAffinity": {}},
    },
    "controller": {**_PODS, "settings": {"cordon": True}},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "hosts": ["llm.example.com"],
        "tls": [{"secretName": "certificate", "hosts": ["llm.example.com"]}],
    },
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["llm.example.com"]},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"name": "apps"}}}],
        "extraEgress": [{"ports": [{"port": 4317, "protocol": "TCP"}]}],
    },
    "serviceMonitor": _MONITOR,
    "podMonitor": _MONITOR,
    "prometheusRule": {"enabled": True},
    "dashboards": {"enabled": True, "annotations": {"grafana_folder": "Moebius"}},
    "test": {"apiKeySecret": {"name": "key"}},
    "extraObjects": [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}},
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-text'}\n",
    ],
    "models": {
        "hub": {
            "source": {"huggingFace": {"id": "Qwen/Qwen3-30B-A3B", "tokenSecret": {"name": "hub"}}},
            "cache": {"kind": "claimTemplate", "size": "200Gi", "storageClassName": "fast"},
            "settings": {"dtype": "bfloat16", "max_running": 64},
        },
        "claim": {
            "source": {"persistentVolumeClaim": {"claimName": "models", "path": "deepseek/v3"}},
            "cache": {"kind": "claim", "claimName": "cache"},
            "gpu": {"count": 8, "resource": "nvidia.com/mig-3g.40gb"},
        },
        "file": {
            "source": {"hostPath": {"path": "/models/m.gguf"}},
            "cache": {"kind": "hostPath", "hostPath": "/var/cache/moebius"},
            "gpu": {"count": 0},
        },
        "image": {"source": {"image": {"reference": "registry.example.com/models/a:1", "path": "a"}}},
        "simulated": {"settings": {"engine": "sim", "sim": {"itl": 0.05}}, "cache": {"size": "1Gi"}},
    },
}

# Name, values, release.
MATRIX: tuple[tuple[str, Values, str], ...] = (
    ("simulated", SIMULATED, "moebius"),
    ("hub", HUB, "moebius"),
    ("everything", EVERYTHING, "prod"),
    ("everything-long", EVERYTHING, LONG),
    ("odd-name", SIMULATED, "7-up.v2"),
    ("long-entry", {"models": {"m" * 40: {"settings": {"engine": "sim"}}}}, LONG),
    ("full-name", merged(SIMULATED, {"fullnameOverride": "x" * 63}), "moebius"),
    ("one-of-each", merged(HUB, {"gateway": {"replicas": 1}, "controller": {"replicas": 1}}), "m"),
    (
        "bare",
        merged(
            SIMULATED,
            {
                "controller": {"enabled": False},
                "rbac": {"create": False},
                "networkPolicy": {"enabled": False},
                "worker": {"pdb": {"enabled": False}, "serviceAccount": {"create": False}},
                "gateway": {"pdb": {"enabled": False}, "serviceAccount": {"create": False, "name": "own"}},
            },
        ),
        "moebius",
    ),
)
