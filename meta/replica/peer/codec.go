package peer

import (
	"fmt"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
)

// codecName is the content subtype of this service's messages: bytes as they
// are. gRPC chooses the codec by it, whatever else the server carries.
const codecName = "ckptfs-peer"

// maxMessage bounds one gRPC message: a batch, or one message that is larger. It
// is gRPC's default, so that the server needs no option of ours.
const maxMessage = 4 << 20

func init() { encoding.RegisterCodecV2(packetCodec{}) }

// packet is one gRPC message.
type packet struct{ bytes []byte }

type packetCodec struct{}

func (packetCodec) Name() string { return codecName }

// Marshal does not copy: the bytes are not changed while gRPC has them.
func (packetCodec) Marshal(v any) (mem.BufferSlice, error) {
	p, ok := v.(*packet)
	if !ok {
		return nil, fmt.Errorf("peer codec: cannot send a %T", v)
	}
	return mem.BufferSlice{mem.SliceBuffer(p.bytes)}, nil
}

func (packetCodec) Unmarshal(data mem.BufferSlice, v any) error {
	p, ok := v.(*packet)
	if !ok {
		return fmt.Errorf("peer codec: cannot receive a %T", v)
	}
	p.bytes = data.Materialize()
	return nil
}
