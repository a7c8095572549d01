// Command fakegpu is a kubelet device plugin that offers devices which are not there.
//
// It speaks the kubelet's real device plugin protocol, so the scheduler, the allocatable of the node and the
// admission of pods behave as on a node with GPUs; a container that was given a device finds its name in
// TESTBED_GPUS and no hardware. The number of devices is read from a file again and again, so it can change
// while pods run; the plugin registers again whenever the kubelet has restarted.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	plugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	pollInterval    = 500 * time.Millisecond
	registerTimeout = 5 * time.Second
	socketName      = "fakegpu.sock"
)

type server struct {
	plugin.UnimplementedDevicePluginServer
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

func register(kubeletSocket, resource string) error {
	connection, err := grpc.NewClient("unix://"+kubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), registerTimeout)
	defer cancel()
	_, err = plugin.NewRegistrationClient(connection).Register(ctx, &plugin.RegisterRequest{
		Version: plugin.Version, Endpoint: socketName, ResourceName: resource,
	})
	return err
}

// serveOnce serves until the kubelet's socket is another one, which means that the kubelet restarted and has
// emptied the folder.
func serveOnce(dir, resource, countFile string) error {
	kubeletSocket := filepath.Join(dir, "kubelet.sock")
	before, err := os.Stat(kubeletSocket)
	if err != nil {
		return err
	}
	own := filepath.Join(dir, socketName)
	if err := os.Remove(own); err != nil && !os.IsNotExist(err) {
		return err
	}
	listener, err := net.Listen("unix", own)
	if err != nil {
		return err
	}
	grpcServer := grpc.NewServer()
	defer grpcServer.Stop()
	plugin.RegisterDevicePluginServer(grpcServer, &server{countFile: countFile})
	go func() {
		if err := grpcServer.Serve(listener); err != nil {
			log.Printf("serve: %v", err)
		}
	}()
	if err := register(kubeletSocket, resource); err != nil {
		return err
	}
	log.Printf("registered %s", resource)
	for {
		time.Sleep(pollInterval)
		now, err := os.Stat(kubeletSocket)
		if err != nil {
			return err
		}
		if !os.SameFile(before, now) || now.ModTime() != before.ModTime() {
			return fmt.Errorf("the kubelet restarted")
		}
	}
}

func main() {
	dir := flag.String("dir", "", "the kubelet's device-plugins folder")
	resource := flag.String("resource", "nvidia.com/gpu", "extended resource to offer")
	countFile := flag.String("count-file", "", "file that holds the number of devices")
	flag.Parse()
	for {
		err := serveOnce(*dir, *resource, *countFile)
		log.Printf("registering again: %v", err)
		time.Sleep(pollInterval)
	}
}
