{{- define "phasesplit.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "phasesplit.operatorName" -}}{{ include "phasesplit.fullname" . }}-operator{{- end -}}
{{- define "phasesplit.routerName" -}}{{ include "phasesplit.fullname" . }}-router{{- end -}}
{{- define "phasesplit.prometheusName" -}}{{ include "phasesplit.fullname" . }}-prometheus{{- end -}}

{{- define "phasesplit.controlImage" -}}
{{ .Values.images.control.repository }}:{{ .Values.images.control.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "phasesplit.workerImage" -}}
{{ .Values.images.worker.repository }}:{{ .Values.images.worker.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "phasesplit.prometheusAddress" -}}
{{- if .Values.prometheus.address -}}
{{ .Values.prometheus.address }}
{{- else if .Values.prometheus.enabled -}}
http://{{ .Values.prometheus.serviceName }}.{{ .Release.Namespace }}:9090
{{- end -}}
{{- end -}}

{{/* Labels of everything; call with (dict "root" $ "component" "operator" "name" "phasesplit-operator"). */}}
{{- define "phasesplit.labels" -}}
{{ include "phasesplit.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end -}}

{{/* Immutable labels, used by selectors. */}}
{{- define "phasesplit.selector" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/part-of: phasesplit
{{- end -}}

{{- define "phasesplit.operatorLabels" -}}
{{ include "phasesplit.labels" (dict "root" . "component" "operator" "name" "phasesplit-operator") }}
{{- end -}}

{{- define "phasesplit.prometheusLabels" -}}
{{ include "phasesplit.labels" (dict "root" . "component" "prometheus" "name" "prometheus") }}
{{- end -}}

{{- define "phasesplit.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "phasesplit.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "phasesplit.pullSecrets" -}}
{{- with .Values.imagePullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* What the operator does in the namespaces it serves. */}}
{{- define "phasesplit.namespacedRules" -}}
- apiGroups: [phasesplit.dev]
  resources: [disaggregatedmodels]
  verbs: [get, list, watch]
- apiGroups: [phasesplit.dev]
  resources: [disaggregatedmodels/status]
  verbs: [patch]
# Where owner references are checked, one that blocks deletion needs this right.
- apiGroups: [phasesplit.dev]
  resources: [disaggregatedmodels/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [statefulsets, deployments, controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings]
  verbs: [get, list, watch, create, patch, delete]
# Only this role can be handed out.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [clusterroles]
  resourceNames: [{{ include "phasesplit.routerName" . }}]
  verbs: [bind]
# Secrets are never listed: the operator makes each object's own and reads what an object refers to.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch, delete]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch]
- apiGroups: ["", events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end -}}

{{/* What has no namespace. */}}
{{- define "phasesplit.clusterRules" -}}
- apiGroups: [""]
  resources: [nodes, persistentvolumes]
  verbs: [get, list, watch]
- apiGroups: [node.k8s.io]
  resources: [runtimeclasses]
  verbs: [get, list]
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [get, list, watch]
{{- end -}}
