package peer

import (
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

const (
	serviceName = "ckptfs.meta.v1.Peer"
	method      = "/" + serviceName + "/Stream"
)

type streamServer interface{ serve(grpc.ServerStream) error }

var serviceDesc = grpc.ServiceDesc{
	ServiceName: serviceName,
	HandlerType: (*streamServer)(nil),
	Streams: []grpc.StreamDesc{{
		StreamName: "Stream", ServerStreams: true, ClientStreams: true,
		Handler: func(srv any, s grpc.ServerStream) error { return srv.(streamServer).serve(s) },
	}},
}

// Register adds the service to a gRPC server, which may carry others.
func (t *Transport) Register(s grpc.ServiceRegistrar) { s.RegisterService(&serviceDesc, t) }

// serve is one incoming stream. It ends with the stream, at the latest when
// the gRPC server is stopped.
func (t *Transport) serve(s grpc.ServerStream) error {
	var raw packet
	if err := s.RecvMsg(&raw); err != nil {
		return err
	}
	var h hello
	err := codec.Decode(raw.bytes, &h)
	if err == nil {
		err = t.check(&h)
	}
	if serr := send(s, codec.Encode(nil, refusal(err))); err != nil || serr != nil {
		return errors.Join(err, serr)
	}
	t.mu.Lock()
	handler := t.mu.handler
	t.mu.Unlock()
	if h.purpose == purposeCopy {
		return t.serveCopy(s, handler, h.from)
	}
	for {
		var raw packet
		if err := s.RecvMsg(&raw); err != nil {
			return endOf(err)
		}
		err := splitBatch(raw.bytes, func(m []byte) error { return handler.StepMessage(h.from, m) })
		if err != nil {
			return err
		}
	}
}

func endOf(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// check refuses strangers.
func (t *Transport) check(h *hello) error {
	ours := t.cfg.Cluster()
	t.mu.Lock()
	ready := t.mu.handler != nil && !t.mu.closed
	t.mu.Unlock()
	_, known := t.cfg.Peers[h.from]
	switch {
	case !ready:
		return errkind.Unavailable.Wrap("metadata server %d is not ready", t.cfg.ID)
	case h.max < version || h.min > version:
		return errkind.Version.Wrap("metadata server %d speaks version %d of the protocol, server %d %d to %d",
			t.cfg.ID, version, h.from, h.min, h.max)
	case h.to != t.cfg.ID:
		return errkind.Invalid.Wrap("this is metadata server %d, not %d: the lists of peers disagree", t.cfg.ID, h.to)
	case !known || h.from == t.cfg.ID:
		return errkind.Invalid.Wrap("metadata server %d is not in the list of peers of server %d", h.from, t.cfg.ID)
	case ours != (ids.UUID{}) && h.cluster != (ids.UUID{}) && ours != h.cluster:
		return errkind.WrongCluster.Wrap("metadata server %d belongs to cluster %s, server %d to %s",
			t.cfg.ID, ours, h.from, h.cluster)
	case h.purpose != purposeMessages && h.purpose != purposeCopy:
		return errkind.Unsupported.Wrap("stream for purpose %d", h.purpose)
	}
	return nil
}

func (t *Transport) serveCopy(s grpc.ServerStream, handler Handler, from uint64) error {
	err := receiveCopy(s, handler, from)
	if serr := send(s, codec.Encode(nil, refusal(err))); err == nil {
		err = serr
	}
	return err
}

func receiveCopy(s grpc.ServerStream, handler Handler, from uint64) error {
	c, err := handler.ReceiveSnapshot(from)
	if err != nil {
		return fmt.Errorf("receive a copy of the metadata from server %d: %w", from, err)
	}
	defer c.Abort()
	for {
		var raw packet
		if err := s.RecvMsg(&raw); errors.Is(err, io.EOF) {
			return c.Finish()
		} else if err != nil {
			return err
		}
		if err := c.Chunk(raw.bytes); err != nil {
			return err
		}
	}
}
