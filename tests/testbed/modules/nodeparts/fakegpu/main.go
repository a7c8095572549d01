// Command fakegpu is a kubelet device plugin that offers devices which are not there.
//
// It speaks the kubelet's real device plugin protocol, so the scheduler, the allocatable of the node and the
// admission of pods behave as on a node with GPUs; a container that was given a device finds its name in
// TESTBED_GPUS and no hardware. The number of devices is read from a file again and again, so it can change
// while pods run. The kubelet finds the plugin by its socket in the plugins_registry folder, which is the
// kubelet's own; the older kubelet.sock is one for all kubelets of a host.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	plugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const pollInterval = 500 * time.Millisecond

type server struct {
	plugin.UnimplementedDevicePluginServer
	registration.UnimplementedRegistrationServer
	socket    string
	resource  string
	countFile string
}

func (s *server) count() int {
	text, err := os.ReadFile(s.countFile)
	if err != nil {
		return 0
	}
	count, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0
	}
	return count
}

func (s *server) GetDevicePluginOptions(context.Context, *plugin.Empty) (*plugin.DevicePluginOptions, error) {
	return &plugin.DevicePluginOptions{}, nil
}

func (s *server) ListAndWatch(_ *plugin.Empty, stream plugin.DevicePlugin_ListAndWatchServer) error {
	for sent := -1; ; {
		if count := s.count(); count != sent {
			devices := make([]*plugin.Device, 0, count)
			for i := range count {
				devices = append(devices, &plugin.Device{ID: fmt.Sprintf("fake-%d", i), Health: plugin.Healthy})
			}
			if err := stream.Send(&plugin.ListAndWatchResponse{Devices: devices}); err != nil {
				return err
			}
			sent = count
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-time.After(pollInterval):
		}
	}
}

func (s *server) Allocate(_ context.Context, request *plugin.AllocateRequest) (*plugin.AllocateResponse, error) {
	response := &plugin.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		response.ContainerResponses = append(response.ContainerResponses, &plugin.ContainerAllocateResponse{
			Envs: map[string]string{"TESTBED_GPUS": strings.Join(container.DevicesIds, ",")},
		})
	}
	return response, nil
}

func (s *server) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type: registration.DevicePlugin, Name: s.resource, Endpoint: s.socket,
		SupportedVersions: []string{plugin.Version},
	}, nil
}

func (s *server) NotifyRegistrationStatus(
	_ context.Context, status *registration.RegistrationStatus,
) (*registration.RegistrationStatusResponse, error) {
	if !status.PluginRegistered {
		log.Printf("the kubelet refused the plugin: %s", status.Error)
	}
	return &registration.RegistrationStatusResponse{}, nil
}

func serve(s *server) error {
	if err := os.Remove(s.socket); err != nil && !os.IsNotExist(err) {
		return err
	}
	listener, err := net.Listen("unix", s.socket)
	if err != nil {
		return err
	}
	grpcServer := grpc.NewServer()
	plugin.RegisterDevicePluginServer(grpcServer, s)
	registration.RegisterRegistrationServer(grpcServer, s)
	return grpcServer.Serve(listener)
}

func main() {
	s := &server{}
	flag.StringVar(&s.socket, "socket", "", "socket in the kubelet's plugins_registry folder")
	flag.StringVar(&s.resource, "resource", "nvidia.com/gpu", "extended resource to offer")
	flag.StringVar(&s.countFile, "count-file", "", "file that holds the number of devices")
	flag.Parse()
	log.Fatal(serve(s))
}
