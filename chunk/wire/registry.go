package wire

import (
	"fmt"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
)

// RequestBody returns a new body for requests of op; nil where op has none.
// An unknown op is an error that wraps errkind.Unsupported.
func RequestBody(op Op) (codec.Message, error) {
	switch op {
	case OpPing:
		return nil, nil
	case OpOpen:
		return new(Open), nil
	case OpPut:
		return new(Put), nil
	case OpSeal:
		return new(Seal), nil
	case OpStore:
		return new(Store), nil
	case OpAbort, OpStat:
		return new(ChunkRef), nil
	case OpRead:
		return new(Read), nil
	case OpCancel:
		return new(Cancel), nil
	}
	return nil, errkind.Unsupported.Wrap("data protocol operation %d", op)
}

// ReplyBody returns a new body for replies of op with the status; nil where
// there is none. Busy carries a Grant, for its RetryAfter, whatever the op.
// An unknown op is an error that wraps errkind.Unsupported.
func ReplyBody(op Op, status errkind.Kind) (codec.Message, error) {
	known, ok := op >= OpPing && op < OpCancel, status == errkind.OK
	switch {
	case !known:
		return nil, errkind.Unsupported.Wrap("reply to data protocol operation %d", op)
	case status == errkind.Busy, ok && (op == OpOpen || op == OpPut):
		return new(Grant), nil
	case ok && (op == OpSeal || op == OpStore):
		return new(Sealed), nil
	case ok && op == OpRead:
		return new(Data), nil
	case ok && op == OpStat:
		return new(Stat), nil
	}
	return nil, nil
}

var opNames = [...]string{"", "ping", "open", "put", "seal", "store", "abort", "read", "stat", "cancel"}

func (o Op) String() string {
	if int(o) < len(opNames) && o > 0 {
		return opNames[o]
	}
	return fmt.Sprintf("operation %d", uint8(o))
}
