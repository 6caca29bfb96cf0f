{{/* The pods of a component as peers of a policy: (list $ COMPONENT). */}}
{{- define "moebius.podPeers" -}}
- podSelector:
    matchLabels:
      {{- include "moebius.selectorLabels" . | nindent 6 }}
{{- end -}}

{{/* A rule of egress to {cidr, ports}. */}}
{{- define "moebius.egress" -}}
to: [{ipBlock: {cidr: {{ .cidr }}}}]
ports:
  {{- range .ports }}
  - {port: {{ . }}, protocol: TCP}
  {{- end }}
{{- end -}}

{{/* What monitors have in common: endpoints of one port: (list PORT VALUES). */}}
{{- define "moebius.endpoint" -}}
- port: {{ index . 0 }}
  {{- with index . 1 }}
  interval: {{ .interval }}
  {{- with .scrapeTimeout }}
  scrapeTimeout: {{ . }}
  {{- end }}
  honorLabels: {{ .honorLabels }}
  {{- with .relabelings }}
  relabelings:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .metricRelabelings }}
  metricRelabelings:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
{{- end -}}
