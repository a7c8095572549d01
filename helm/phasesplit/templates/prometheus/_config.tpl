{{- define "phasesplit.prometheusConfig" -}}
global:
  scrape_interval: {{ .Values.prometheus.scrapeIntervalSeconds }}s
  scrape_timeout: {{ min .Values.prometheus.scrapeIntervalSeconds 5 }}s
scrape_configs:
  - job_name: phasesplit
    # Routers and workers say themselves which object and namespace they belong to.
    honor_labels: true
    kubernetes_sd_configs:
      - role: pod
        {{- with .Values.operator.watchNamespace }}
        namespaces:
          names: [{{ . }}]
        {{- end }}
        selectors:
          - role: pod
            label: app.kubernetes.io/part-of=phasesplit
    relabel_configs:
      - source_labels: [__meta_kubernetes_pod_annotation_prometheus_io_scrape]
        regex: "true"
        action: keep
      - source_labels: [__meta_kubernetes_pod_phase]
        regex: Running
        action: keep
      - source_labels: [__meta_kubernetes_pod_container_port_name]
        regex: http|metrics
        action: keep
      - source_labels: [__meta_kubernetes_pod_name]
        target_label: pod
      - source_labels: [__meta_kubernetes_pod_node_name]
        target_label: node
      - source_labels: [__meta_kubernetes_pod_label_app_kubernetes_io_component]
        target_label: component
{{- end -}}
