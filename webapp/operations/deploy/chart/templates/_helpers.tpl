{{/* Names and what every pod of the server has. */}}

{{- define "slipway.name" -}}
{{- if contains "slipway" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-slipway" (.Release.Name | trunc 32 | trimSuffix "-") }}{{ end }}
{{- end }}

{{- define "slipway.selector" -}}
app.kubernetes.io/name: slipway
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "slipway.labels" -}}
{{ include "slipway.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "slipway.image" -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "slipway.secret" -}}
{{ .Values.existingSecret | default (include "slipway.name" .) }}
{{- end }}

{{/* The Secret of the Job that runs before an upgrade. */}}
{{- define "slipway.secret.upgrade" -}}
{{ .Values.existingSecret | default (printf "%s-upgrade" (include "slipway.name" .)) }}
{{- end }}

{{- define "slipway.secret.content" -}}
type: Opaque
stringData:
  {{- range $name, $key := .Values.secretKeys }}
  {{ $key }}: {{ required (printf "secretValues.%s is missing: give the value of %s, or name a Secret in existingSecret" $key $name) (get $.Values.secretValues $key) | quote }}
  {{- end }}
{{- end }}

{{- define "slipway.claim" -}}
{{ .Values.persistence.existingClaim | default (include "slipway.name" .) }}
{{- end }}

{{/* The site's own name, of its address. */}}
{{- define "slipway.host" -}}
{{ (urlParse .Values.publicUrl).hostname }}
{{- end }}

{{/* Paths of the gateways, and of one of them. */}}
{{- define "slipway.paths" -}}
{{- range list "/v1" "/tunnel" }}
- path: {{ . }}
  pathType: Prefix
  backend: {service: {name: {{ include "slipway.name" $ }}-gateway, port: {name: http}}}
{{- end }}
- path: /
  pathType: Prefix
  backend: {service: {name: {{ include "slipway.name" $ }}-web, port: {name: http}}}
{{- end }}

{{- define "slipway.container.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "slipway.environment" -}}
- {name: SLIPWAY_DATA_DIR, value: /data}
- {name: SLIPWAY_PUBLIC_URL, value: {{ .Values.publicUrl | quote }}}
{{- with .Values.trustedProxies }}
- {name: FORWARDED_ALLOW_IPS, value: {{ join "," . | quote }}}
{{- end }}
{{- with .Values.gateway.hosts }}
{{- $urls := list }}
{{- range . }}{{ $urls = append $urls (printf "wss://%s/tunnel/" .) }}{{ end }}
- {name: SLIPWAY_GATEWAYS, value: {{ join "," $urls | quote }}}
{{- end }}
{{- range $name, $key := .Values.secretKeys }}
- {name: {{ $name }}_FILE, value: /run/secrets/slipway/{{ $key }}}
{{- end }}
{{- range $name, $value := .Values.settings }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{/* The pod of one process: root, component, command, resources; probe is a path, of its port;
     secret is another than the release's own. */}}
{{- define "slipway.pod" -}}
{{- $values := .root.Values -}}
serviceAccountName: {{ include "slipway.name" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with $values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
securityContext:
  {{- toYaml $values.podSecurityContext | nindent 2 }}
  runAsNonRoot: true
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
terminationGracePeriodSeconds: 45
containers:
  - name: {{ .component }}
    image: {{ include "slipway.image" (dict "root" .root "image" $values.image) }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    command: {{ toJson .command }}
    env:
      {{- include "slipway.environment" .root | nindent 6 }}
    {{- if .probe }}
    ports: [{name: http, containerPort: 8000}]
    startupProbe:
      {{- include "slipway.probe" (dict "path" .alive "failures" 60 "period" 2) | nindent 6 }}
    livenessProbe:
      {{- include "slipway.probe" (dict "path" .alive "failures" 6 "period" 10) | nindent 6 }}
    readinessProbe:
      {{- include "slipway.probe" (dict "path" .probe "failures" 3 "period" 5) | nindent 6 }}
    lifecycle: {preStop: {sleep: {seconds: 5}}}
    {{- end }}
    resources:
      {{- toYaml .resources | nindent 6 }}
    securityContext:
      {{- include "slipway.container.security" . | nindent 6 }}
    volumeMounts:
      - {name: data, mountPath: /data}
      - {name: secrets, mountPath: /run/secrets/slipway, readOnly: true}
      - {name: tmp, mountPath: /tmp}
volumes:
  - {name: data, persistentVolumeClaim: {claimName: {{ include "slipway.claim" .root }}}}
  - {name: secrets, secret: {secretName: {{ .secret | default (include "slipway.secret" .root) }}, defaultMode: 288}}
  - {name: tmp, emptyDir: {}}
{{- with $values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- if .apart }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "slipway.selector" . | nindent 8 }}
{{- end }}
{{- end }}

{{/* A Job of one pod: as slipway.pod. */}}
{{- define "slipway.job" -}}
backoffLimit: 4
activeDeadlineSeconds: 3600
template:
  metadata:
    labels:
      {{- include "slipway.labels" . | nindent 6 }}
  spec:
    restartPolicy: Never
    {{- include "slipway.pod" . | nindent 4 }}
{{- end }}

{{/* The site answers under its own names alone: the kubelet asks by an address. */}}
{{- define "slipway.probe" -}}
httpGet: {path: {{ .path }}, port: http, httpHeaders: [{name: Host, value: localhost}]}
periodSeconds: {{ .period }}
timeoutSeconds: 5
failureThreshold: {{ .failures }}
{{- end }}

{{/* A Deployment: as slipway.pod, with name, replicas and strategy. */}}
{{- define "slipway.deployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "slipway.name" .root }}-{{ .name }}
  labels:
    {{- include "slipway.labels" . | nindent 4 }}
    {{- with .only }}
    slipway/gateway: {{ . | quote }}
    {{- end }}
spec:
  replicas: {{ .replicas }}
  revisionHistoryLimit: 3
  strategy: {{ toJson .strategy }}
  selector:
    matchLabels:
      {{- include "slipway.selector" . | nindent 6 }}
      {{- with .only }}
      slipway/gateway: {{ . | quote }}
      {{- end }}
  template:
    metadata:
      labels:
        {{- include "slipway.labels" . | nindent 8 }}
        {{- with .only }}
        slipway/gateway: {{ . | quote }}
        {{- end }}
    spec:
      {{- include "slipway.pod" . | nindent 6 }}
{{- end }}
