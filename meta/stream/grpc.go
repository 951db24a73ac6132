package stream

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/mem"

	"github.com/ckptfs/ckptfs/internal/errkind"
)

// The gRPC names of the service.
const (
	ServiceName = "ckptfs.meta.v1.Metadata"
	method      = "/" + ServiceName + "/Stream"
	// CodecName is the content subtype of raw messages.
	CodecName = "ckptfs-raw"
)

func init() { encoding.RegisterCodecV2(RawCodec{}) }

// RawCodec passes *Raw through gRPC untouched, and refuses everything else.
type RawCodec struct{}

// Raw is one message on its way through gRPC.
type Raw struct{ Bytes []byte }

// Name returns CodecName.
func (RawCodec) Name() string { return CodecName }

// Marshal gives the bytes away; they return to gRPC's pool once written.
func (RawCodec) Marshal(v any) (mem.BufferSlice, error) {
	r, ok := v.(*Raw)
	if !ok {
		return nil, fmt.Errorf("raw codec: cannot send a %T", v)
	}
	return mem.BufferSlice{mem.NewBuffer(&r.Bytes, mem.DefaultBufferPool())}, nil
}

// Unmarshal copies the bytes into memory of their own: a mutation's bytes live
// on in the log.
func (RawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	r, ok := v.(*Raw)
	if !ok {
		return fmt.Errorf("raw codec: cannot receive a %T", v)
	}
	r.Bytes = data.Materialize()
	return nil
}

// NewBuffer returns an empty buffer with room for n bytes, to be filled and
// handed to Send of a gRPC connection, which recycles it.
func NewBuffer(n int) []byte {
	return (*mem.DefaultBufferPool().Get(n))[:0]
}

// Keepalive of idle connections.
const (
	keepaliveEvery = 10 * time.Second
	keepaliveWait  = 5 * time.Second
	minPing        = 5 * time.Second
	// connectLimit bounds the TCP handshake with a host that does not answer.
	connectLimit = 3 * time.Second
)

// ServerOptions are what a *grpc.Server that carries this service needs. Other
// services may share the server.
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(MaxMessage),
		grpc.MaxSendMsgSize(MaxMessage),
		grpc.InitialWindowSize(1 << 20),
		grpc.InitialConnWindowSize(4 << 20),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: keepaliveEvery, Timeout: keepaliveWait}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: minPing, PermitWithoutStream: true}),
	}
}

// server is the handler type of the service description.
type server interface{ serve(Conn) }

type serverFunc func(Conn)

func (f serverFunc) serve(c Conn) { f(c) }

// Register adds the service to s. serve is called in a goroutine of its own
// for each connection, and the connection ends when it returns.
func Register(s grpc.ServiceRegistrar, serve func(Conn)) {
	s.RegisterService(&grpc.ServiceDesc{
		ServiceName: ServiceName,
		HandlerType: (*server)(nil),
		Streams: []grpc.StreamDesc{{
			StreamName: "Stream", Handler: handle, ServerStreams: true, ClientStreams: true,
		}},
	}, serverFunc(serve))
}

func handle(srv any, ss grpc.ServerStream) error {
	c := &serverConn{ss: ss, done: make(chan struct{})}
	go func() {
		defer c.Close()
		srv.(server).serve(c)
	}()
	select {
	case <-c.done:
	case <-ss.Context().Done():
	}
	// Returning ends the stream, which ends a Send or Recv that still waits.
	return nil
}

// serverConn is the server's end of a gRPC stream.
type serverConn struct {
	ss   grpc.ServerStream
	once sync.Once
	done chan struct{}
}

// Send writes the message to the stream.
func (c *serverConn) Send(msg []byte) error { return c.ss.SendMsg(&Raw{Bytes: msg}) }

// Recv reads the next message of the stream.
func (c *serverConn) Recv() ([]byte, error) {
	var r Raw
	if err := c.ss.RecvMsg(&r); err != nil {
		return nil, err
	}
	return r.Bytes, nil
}

// Close ends the stream.
func (c *serverConn) Close() { c.once.Do(func() { close(c.done) }) }

// GRPC is the transport of production. Its zero value is ready.
type GRPC struct {
	// Options are added to those of the transport, for TLS for example;
	// without any the connection is plain TCP.
	Options []grpc.DialOption
}

// Connect starts a stream to addr.
func (g GRPC) Connect(ctx context.Context, addr string) (Conn, error) {
	opts := append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithInitialWindowSize(1 << 20),
		grpc.WithInitialConnWindowSize(4 << 20),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: keepaliveEvery, Timeout: keepaliveWait, PermitWithoutStream: true}),
		grpc.WithDefaultCallOptions(grpc.CallContentSubtype(CodecName), grpc.MaxCallRecvMsgSize(MaxMessage), grpc.MaxCallSendMsgSize(MaxMessage)),
		grpc.WithDisableServiceConfig(),
		grpc.WithNoProxy(),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: connectLimit}),
	}, g.Options...)
	cc, err := grpc.NewClient("passthrough:///"+addr, opts...)
	if err != nil {
		return nil, errkind.Unavailable.Wrap("connect to %s: %v", addr, err)
	}
	sctx, cancel := context.WithCancel(context.Background())
	stop := context.AfterFunc(ctx, cancel)
	cs, err := cc.NewStream(sctx, &grpc.StreamDesc{StreamName: "Stream", ServerStreams: true, ClientStreams: true}, method)
	if err == nil && !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		cancel()
		_ = cc.Close()
		return nil, errkind.Unavailable.Wrap("connect to %s: %v", addr, err)
	}
	return &clientConn{cc: cc, cs: cs, cancel: cancel}, nil
}

// clientConn is the client's end of a gRPC stream, with the TCP connection
// that carries nothing else.
type clientConn struct {
	cc     *grpc.ClientConn
	cs     grpc.ClientStream
	cancel context.CancelFunc
	once   sync.Once
}

// Send writes the message to the stream.
func (c *clientConn) Send(msg []byte) error { return c.cs.SendMsg(&Raw{Bytes: msg}) }

// Recv reads the next message of the stream.
func (c *clientConn) Recv() ([]byte, error) {
	var r Raw
	if err := c.cs.RecvMsg(&r); err != nil {
		return nil, err
	}
	return r.Bytes, nil
}

// Close ends the stream and its connection.
func (c *clientConn) Close() {
	c.once.Do(func() {
		c.cancel()
		_ = c.cc.Close()
	})
}
