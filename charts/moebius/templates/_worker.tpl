{{/* Labels that select the workers of a model: (list $ NAME). */}}
{{- define "moebius.workerLabels" -}}
{{ include "moebius.selectorLabels" (list (index . 0) "worker") }}
moebius.dev/model: {{ index . 1 }}
{{- end -}}

{{/* What a model's source comes to, as JSON {model, volume}: (list $ NAME VALUES). */}}
{{- define "moebius.source" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $source := (index . 2).source -}}
{{- $found := list -}}
{{- with $source.huggingFace.id -}}
{{- $found = append $found (dict "model" .) -}}
{{- end -}}
{{- with $source.persistentVolumeClaim.claimName -}}
{{- $volume := dict "persistentVolumeClaim" (dict "claimName" . "readOnly" true) -}}
{{- $found = append $found (dict "model" (clean (printf "/model/%s" $source.persistentVolumeClaim.path)) "volume" $volume) -}}
{{- end -}}
{{- with $source.hostPath.path -}}
{{- $file := hasSuffix ".gguf" . -}}
{{- $volume := dict "hostPath" (dict "path" ($file | ternary (dir .) .) "type" "Directory") -}}
{{- $found = append $found (dict "model" ($file | ternary (printf "/model/%s" (base .)) "/model") "volume" $volume) -}}
{{- end -}}
{{- with $source.image.reference -}}
{{- if semverCompare "<1.33.0-0" $root.Capabilities.KubeVersion.Version -}}
{{- fail (printf "models.%s.source.image needs Kubernetes 1.33, this is %s: use another source" $name $root.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- $volume := dict "image" (dict "reference" . "pullPolicy" $source.image.pullPolicy) -}}
{{- $found = append $found (dict "model" (clean (printf "/model/%s" $source.image.path)) "volume" $volume) -}}
{{- end -}}
{{- $simulated := eq (dig "engine" "model" (index . 2).settings) "sim" -}}
{{- if and (not $found) $simulated -}}
{{- $found = list dict -}}
{{- end -}}
{{- if ne (len $found) 1 -}}
{{- fail (printf "models.%s.source names %d models: name one, by huggingFace.id, persistentVolumeClaim.claimName, hostPath.path or image.reference" $name (len $found)) -}}
{{- end -}}
{{- toJson (first $found) -}}
{{- end -}}

{{/* What clients call a model: (list $ NAME VALUES). As a worker would call it by itself, where it knows a name. */}}
{{- define "moebius.servedName" -}}
{{- $source := include "moebius.source" . | fromJson -}}
{{- if (index . 2).servedModelName -}}
{{- (index . 2).servedModelName -}}
{{- else if $source.volume -}}
{{- index . 1 -}}
{{- else if hasSuffix ".gguf" (default "" $source.model) -}}
{{- regexReplaceAll "(-[0-9]{5}-of-[0-9]{5})?[.]gguf$" (base $source.model) "" -}}
{{- else -}}
{{- default "sim" $source.model -}}
{{- end -}}
{{- end -}}

{{/* Affinity that leaves out nodes with a faulty GPU, whatever else is wanted. */}}
{{- define "moebius.workerAffinity" -}}
{{- $affinity := deepCopy . -}}
{{- $fault := dict "key" "moebius.dev/gpu-fault" "operator" "DoesNotExist" -}}
{{- $node := default dict $affinity.nodeAffinity -}}
{{- $required := default dict $node.requiredDuringSchedulingIgnoredDuringExecution -}}
{{- $terms := list -}}
{{- range default (list dict) $required.nodeSelectorTerms -}}
{{- $terms = append $terms (set . "matchExpressions" (append (default list .matchExpressions) $fault)) -}}
{{- end -}}
{{- $_ := set $node "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms) -}}
{{- set $affinity "nodeAffinity" $node | toYaml -}}
{{- end -}}

{{/* A worker's probe: (list $ VALUES SERVICE PATH PROBE). gRPC where the version has it, which speaks no TLS; else HTTP. */}}
{{- define "moebius.workerProbe" -}}
{{- if and (semverCompare ">=1.24.0-0" (index . 0).Capabilities.KubeVersion.Version) (not (index . 1).settings.tls_cert) -}}
grpc: {port: 7601, service: {{ index . 2 }}}
{{- else -}}
httpGet: {path: {{ index . 3 }}, port: metrics}
{{- end }}
{{ toYaml (index . 4) }}
{{- end -}}

{{/* Failures of the startup probe that cover the load budget: (list NAME VALUES). */}}
{{- define "moebius.startupFailures" -}}
{{- $budget := dig "load_stall_timeout" 600.0 (index . 1).settings -}}
{{- divf $budget (index . 1).probes.startup.periodSeconds | ceil | int | max 12 -}}
{{- end -}}

{{/* Directories of the cache, as environment variables. */}}
{{- define "moebius.cacheEnv" -}}
- {name: HOME, value: /tmp}
- {name: MOEBIUS_CACHE_DIR, value: /var/cache/moebius/kernels}
- {name: HF_HOME, value: /var/cache/moebius/huggingface}
- {name: XDG_CACHE_HOME, value: /var/cache/moebius/other}
{{- end -}}
