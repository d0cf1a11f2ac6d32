{{- define "labels" -}}
app.kubernetes.io/name: thinwire
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pod" -}}
automountServiceAccountToken: false
terminationGracePeriodSeconds: 60
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "small" -}}
resources: {requests: {cpu: 100m, memory: 64Mi}, limits: {cpu: "1", memory: 2Gi}}
{{- end }}

{{- define "unpack" -}}
- name: unpack
  image: {{ .Values.image }}
  command: [python, -m, tarfile, --filter=data, -e, /archive/app.tgz, /app]
  {{- include "container" . | nindent 2 }}
  {{- include "small" . | nindent 2 }}
  volumeMounts:
    - {name: archive, mountPath: /archive, readOnly: true}
    - {name: app, mountPath: /app}
{{- end }}

{{- define "state" -}}
accessModes: [{{ .accessMode }}]
resources: {requests: {storage: {{ .size }}}}
{{- end }}
