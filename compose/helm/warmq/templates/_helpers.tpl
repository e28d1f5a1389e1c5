{{/* `-worker-` and a worker's name, 24 more, follow; KEDA puts the whole into a label, which holds 63. */}}
{{- define "warmq.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 39 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 39 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 39 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "warmq.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- if .model }}
warmq/worker: {{ .model }}
{{- end }}
{{- end -}}

{{- define "warmq.labels" -}}
{{ include "warmq.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: warmq
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* The same with `more`, labels of whoever installs it; `at` is where those are. */}}
{{- define "warmq.labelsAnd" -}}
{{- $own := fromYaml (include "warmq.labels" .) -}}
{{- range $label := keys (.more | default dict) -}}
{{- if or (hasKey $own $label) (eq $label "warmq/worker") -}}
{{- fail (printf "%s has the label %s, which the chart sets itself; leave it out" $.at $label) -}}
{{- end -}}
{{- end -}}
{{ include "warmq.labels" . }}
{{- with .more }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "warmq.image" -}}
{{- $repository := .image.repository | default .repository -}}
{{- if .image.digest -}}
{{ .root.Values.imageRegistry }}{{ $repository }}@{{ .image.digest }}
{{- else -}}
{{ .root.Values.imageRegistry }}{{ $repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "warmq.serviceAccount" -}}
{{- if .Values.serviceAccount.name -}}
{{ .Values.serviceAccount.name }}
{{- else if .Values.serviceAccount.create -}}
{{ include "warmq.fullname" . }}
{{- else -}}
default
{{- end -}}
{{- end -}}

{{/* Of every container: no rights that it does not need, and no file that it may change. */}}
{{- define "warmq.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* The settings that workers and gateways share; each may be another user of Redis. */}}
{{- define "warmq.env" -}}
{{- $redis := .root.Values.redis -}}
{{- $own := ternary $redis.workerKey $redis.gatewayKey (eq .component "worker") -}}
- name: WARMQ_REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ $redis.existingSecret | quote }}, key: {{ $own | default $redis.key | quote }}}
{{- if .root.Values.queue }}
- {name: WARMQ_QUEUE, value: {{ .root.Values.queue | quote }}}
{{- end }}
{{- end -}}

{{/* Refuses settings that the chart makes of other values, on which more than the setting depends. */}}
{{- define "warmq.refuseOwn" -}}
{{- $own := merge (dict "WARMQ_REDIS_URL" "redis.existingSecret" "WARMQ_QUEUE" "queue") .own -}}
{{- $given := keys (.spec.env | default dict) -}}
{{- range .spec.extraEnv -}}
{{- $given = append $given .name -}}
{{- end -}}
{{- range $given -}}
{{- if hasKey $own . -}}
{{- fail (printf "%s sets the environment's %s; set %s instead" $.at . (get $own .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether the heartbeat is not older than these seconds and says one of these states. */}}
{{- define "warmq.heartbeat" -}}
command:
  - sh
  - -c
  - test -n "$(find /run/warmq/heartbeat -newermt '-{{ .seconds }} seconds')" && grep -qxE '{{ .states }}' /run/warmq/heartbeat
{{- end -}}

{{/* Where pods are placed, of a worker or the gateway. */}}
{{- define "warmq.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end -}}
