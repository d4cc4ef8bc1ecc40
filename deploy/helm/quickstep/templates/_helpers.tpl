{{- define "quickstep.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "quickstep.labels" -}}
app.kubernetes.io/name: quickstep
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "quickstep.selector" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "quickstep.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* What the pods of servers and of engines have in common. */}}
{{- define "quickstep.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "quickstep.container" -}}
image: {{ include "quickstep.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{- define "quickstep.env" -}}
- name: QUICKSTEP_CACHE_DIR
  value: /cache/quickstep
- name: HF_HOME
  value: /cache/huggingface
{{- if .Values.engines.enabled }}
- name: QUICKSTEP_ENGINE_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.engines.tokenSecret }}
      key: token
{{- end }}
{{- end }}

{{- define "quickstep.mounts" -}}
- name: cache
  mountPath: /cache
- name: tmp
  mountPath: /tmp
- name: shm
  mountPath: /dev/shm
{{- end }}

{{- define "quickstep.volumes" -}}
- name: cache
{{- if .Values.cache.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .Values.cache.existingClaim }}
{{- else }}
  emptyDir: {}
{{- end }}
- name: tmp
  emptyDir: {}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.sharedMemory }}
{{- end }}

{{/* The addresses of the engines, as --engines takes them. */}}
{{- define "quickstep.addresses" -}}
{{- $name := include "quickstep.name" . -}}
{{- range $number := until (int .Values.engines.replicas) -}}
{{- if $number }},{{ end }}{{ $name }}-engines-{{ $number }}.{{ $name }}-engines:8100
{{- end -}}
{{- end }}
