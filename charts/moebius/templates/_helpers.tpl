{{/* The prefix of all names. Names of Services have no dots and do not begin with a digit; those of releases may. */}}
{{- define "moebius.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- regexReplaceAll "^([0-9])" (default $full .Values.fullnameOverride | replace "." "-") "m${1}" | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* A name with a suffix: (list $ SUFFIX). At most 52 characters, since a StatefulSet's pods carry its name and 11 more
in a label; what is longer is cut and told apart by a hash. */}}
{{- define "moebius.named" -}}
{{- $full := printf "%s-%s" (include "moebius.fullname" (index . 0)) (index . 1) -}}
{{- if gt (len $full) 52 -}}
{{- printf "%s-%s" ($full | trunc 43 | trimSuffix "-") ($full | sha256sum | trunc 8) -}}
{{- else -}}
{{- $full -}}
{{- end -}}
{{- end -}}

{{/* Labels that select the pods of a component: (list $ COMPONENT). Nothing that an upgrade changes. */}}
{{- define "moebius.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of an object: (list $ COMPONENT). */}}
{{- define "moebius.labels" -}}
{{- $root := index . 0 -}}
{{ include "moebius.selectorLabels" . }}
app.kubernetes.io/part-of: moebius
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Name and labels of an object: (list $ COMPONENT SUFFIX). */}}
{{- define "moebius.metadata" -}}
name: {{ include "moebius.named" (list (index . 0) (index . 2)) }}
namespace: {{ (index . 0).Release.Namespace }}
labels:
  {{- include "moebius.labels" (list (index . 0) (index . 1)) | nindent 2 }}
{{- end -}}

{{/* An image: (list $ VALUES DEFAULT-TAG). */}}
{{- define "moebius.image" -}}
{{- $image := index . 1 -}}
{{- $path := $image.repository -}}
{{- with default (index . 0).Values.imageRegistry $image.registry -}}
{{- $path = printf "%s/%s" (trimSuffix "/" .) $path -}}
{{- end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $path $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $path (default (index . 2) $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* The service account of a component: (list $ VALUES COMPONENT). */}}
{{- define "moebius.serviceAccount" -}}
{{- $account := (index . 1).serviceAccount -}}
{{- if $account.create -}}
{{- default (include "moebius.named" (list (index . 0) (index . 2))) $account.name -}}
{{- else -}}
{{- default "default" $account.name -}}
{{- end -}}
{{- end -}}

{{/* The settings file of a program. Whole numbers lose the fraction that every number of a values file gets. */}}
{{- define "moebius.settings" -}}
{{- regexReplaceAll "(?m)^(\\s*[\\w.]+ = -?\\d+)\\.0$" (toToml .) "${1}" -}}
{{- end -}}

{{/* The models with their defaults filled in, as JSON: name -> values. */}}
{{- define "moebius.models" -}}
{{- $models := dict -}}
{{- range $name, $own := .Values.models -}}
{{- $_ := set $models $name (mustMergeOverwrite (deepCopy $.Values.worker) (default dict $own)) -}}
{{- end -}}
{{- toJson $models -}}
{{- end -}}

{{/* What pods of all components have in common: (list $ VALUES COMPONENT). */}}
{{- define "moebius.podSettings" -}}
{{- $root := index . 0 -}}
{{- $values := index . 1 -}}
serviceAccountName: {{ include "moebius.serviceAccount" . }}
automountServiceAccountToken: {{ ne (index . 2) "worker" }}
enableServiceLinks: false
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml $values.podSecurityContext | nindent 2 }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Topology spread constraints over the pods with some labels: (list CONSTRAINTS LABELS). */}}
{{- define "moebius.topologySpread" -}}
{{- $labels := index . 1 -}}
{{- with index . 0 }}
topologySpreadConstraints:
  {{- range . }}
  - {{- merge (dict "labelSelector" (dict "matchLabels" (fromYaml $labels))) . | toYaml | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* A probe by HTTP: (list PATH PORT VALUES). */}}
{{- define "moebius.httpProbe" -}}
httpGet: {path: {{ index . 0 }}, port: {{ index . 1 }}}
{{ toYaml (index . 2) }}
{{- end -}}

{{/* A preStop hook that waits so many seconds: (list $ SECONDS). Kubernetes itself waits from 1.30 on. */}}
{{- define "moebius.preStop" -}}
preStop:
  {{- if semverCompare ">=1.30.0-0" (index . 0).Capabilities.KubeVersion.Version }}
  sleep: {seconds: {{ index . 1 }}}
  {{- else }}
  exec: {command: [sleep, {{ index . 1 | quote }}]}
  {{- end }}
{{- end -}}

{{/* Seconds from the deletion of a gateway to SIGKILL. */}}
{{- define "moebius.gatewayGrace" -}}
{{- $needed := addf .Values.gateway.preStopSeconds (dig "drain_grace" 30.0 .Values.gateway.settings) 10 | ceil | int -}}
{{- $given := .Values.gateway.terminationGracePeriodSeconds -}}
{{- if and (not (kindIs "invalid" $given)) (lt (int $given) $needed) -}}
{{- fail (printf "gateway.terminationGracePeriodSeconds is %d, but gateways wait gateway.preStopSeconds and then let streams go on for gateway.settings.drain_grace, which takes up to %d s: raise it to that, or leave it out" (int $given) $needed) -}}
{{- end -}}
{{- kindIs "invalid" $given | ternary $needed (int (default 0 $given)) -}}
{{- end -}}

{{/* Seconds from the deletion of a worker to SIGKILL: (list NAME VALUES). */}}
{{- define "moebius.workerGrace" -}}
{{- $needed := addf (dig "drain_timeout" 30.0 (index . 1).settings) 15 | ceil | int -}}
{{- $given := (index . 1).terminationGracePeriodSeconds -}}
{{- if and (not (kindIs "invalid" $given)) (lt (int $given) $needed) -}}
{{- fail (printf "models.%s: terminationGracePeriodSeconds is %d, but workers let requests go on for settings.drain_timeout, which takes up to %d s: raise it to that, or leave it out" (index . 0) (int $given) $needed) -}}
{{- end -}}
{{- kindIs "invalid" $given | ternary $needed (int (default 0 $given)) -}}
{{- end -}}

{{/* The apiVersion of a kind that moved: (list $ NEW OLD VERSION), NEW from that version of Kubernetes on. */}}
{{- define "moebius.apiVersion" -}}
{{- semverCompare (printf ">=%s-0" (index . 3)) (index . 0).Capabilities.KubeVersion.Version | ternary (index . 1) (index . 2) -}}
{{- end -}}
