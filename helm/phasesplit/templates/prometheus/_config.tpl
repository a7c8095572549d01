{{/* The operator says what to scrape: Prometheus itself needs no right in the cluster. */}}
{{- define "phasesplit.prometheusConfig" -}}
global:
  scrape_interval: {{ .Values.prometheus.scrapeIntervalSeconds }}s
  scrape_timeout: {{ min .Values.prometheus.scrapeIntervalSeconds 5 }}s
scrape_configs:
  - job_name: phasesplit
    # Routers and workers say themselves which object and namespace they belong to.
    honor_labels: true
    http_sd_configs:
      - url: http://{{ include "phasesplit.operatorName" . }}.{{ .Release.Namespace }}:8082/targets
        refresh_interval: {{ .Values.prometheus.scrapeIntervalSeconds }}s
  - job_name: phasesplit-operator
    static_configs:
      - targets: ["{{ include "phasesplit.operatorName" . }}.{{ .Release.Namespace }}:8082"]
{{- end -}}
