package api

import (
	"fmt"

	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// maker makes the empty messages of one kind.
type maker struct {
	request func() Request
	reply   func() codec.Message
}

func pair[Q, R any, PQ interface {
	*Q
	Request
}, PR interface {
	*R
	codec.Message
}]() maker {
	return maker{
		request: func() Request { return PQ(new(Q)) },
		reply:   func() codec.Message { return PR(new(R)) },
	}
}

// makers is read-only after initialisation.
var makers = map[Kind]maker{
	KindFound:           pair[Found, Empty](),
	KindCreateSession:   pair[CreateSession, SessionOpened](),
	KindSuspectSessions: pair[SuspectSessions, Empty](),
	KindEndSessions:     pair[EndSessions, Empty](),
	KindCreate:          pair[Create, Entry](),
	KindLink:            pair[Link, Entry](),
	KindUnlink:          pair[Unlink, Entry](),
	KindRename:          pair[Rename, Renamed](),
	KindSetAttr:         pair[SetAttr, Entry](),
	KindSetXattr:        pair[SetXattr, Entry](),
	KindRemoveXattr:     pair[RemoveXattr, Entry](),
	KindCommit:          pair[Commit, Committed](),
	KindSetLayout:       pair[SetLayout, Entry](),
	KindLock:            pair[Lock, Empty](),
	KindReap:            pair[Reap, Empty](),
	KindFreeStep:        pair[FreeStep, Stepped](),
	KindChunksFreed:     pair[ChunksFreed, Empty](),
	KindPlaceChunk:      pair[PlaceChunk, Empty](),
	KindQueueRepair:     pair[QueueRepair, Empty](),
	KindRegisterServer:  pair[RegisterServer, Registered](),
	KindUpdateDisks:     pair[UpdateDisks, Empty](),
	KindSetFeature:      pair[SetFeature, Empty](),
	KindLookup:          pair[Lookup, Entry](),
	KindGetAttr:         pair[GetAttr, Entry](),
	KindReadDir:         pair[ReadDir, Listing](),
	KindOpen:            pair[Open, Opened](),
	KindRelease:         pair[Release, Empty](),
	KindGetMap:          pair[GetMap, Mapped](),
	KindGetBlocks:       pair[GetBlocks, Blocks](),
	KindReadlink:        pair[Readlink, Bytes](),
	KindGetXattr:        pair[GetXattr, Bytes](),
	KindListXattr:       pair[ListXattr, Names](),
	KindStatFS:          pair[StatFS, Totals](),
	KindGetCluster:      pair[GetCluster, cluster.Map](),
	KindTestLock:        pair[TestLock, LockInfo](),
	KindGetLayout:       pair[GetLayout, LayoutOf](),
	KindStatus:          pair[GetStatus, Status](),
	KindRenew:           pair[Renew, Renewed](),
	KindHeartbeat:       pair[Heartbeat, Orders](),
	KindVerdicts:        pair[Verdicts, VerdictList](),
	KindCancel:          pair[CancelRequest, Empty](),
	KindLease:           pair[Lease, Leased](),
}

// NewRequest returns an empty request of the kind, or nil for an unknown one.
func NewRequest(k Kind) Request {
	if m, ok := makers[k]; ok {
		return m.request()
	}
	return nil
}

// NewReply returns the empty body of a reply to a request of the kind, or nil
// for an unknown one.
func NewReply(k Kind) codec.Message {
	if m, ok := makers[k]; ok {
		return m.reply()
	}
	return nil
}

// EncodeRequest writes header and body. Version (when it is zero) and Kind of
// the header are filled in.
func EncodeRequest(h *Header, r Request) []byte {
	if h.Version == 0 {
		h.Version = Version
	}
	h.Kind = r.Kind()
	return codec.Encode(codec.Encode(nil, h), r)
}

// DecodeHeader reads the header alone: what is needed to route a request.
func DecodeHeader(p []byte) (Header, error) {
	var h Header
	if _, err := codec.DecodePrefix(p, &h); err != nil {
		return h, fmt.Errorf("decode request header: %w", err)
	}
	return h, nil
}

// DecodeRequest reads what EncodeRequest wrote; byte strings alias p. Errors
// wrap codec.ErrCorrupt, or errkind.Unsupported for an unknown kind, or
// errkind.Version; the header is valid in the latter two cases.
func DecodeRequest(p []byte) (Header, Request, error) {
	var h Header
	rest, err := codec.DecodePrefix(p, &h)
	if err != nil {
		return Header{}, nil, fmt.Errorf("decode request header: %w", err)
	}
	if h.Version == 0 || h.Version > Version {
		return h, nil, errkind.Version.Wrap("decode request of protocol version %d, this side speaks 1 to %d", h.Version, Version)
	}
	r := NewRequest(h.Kind)
	if r == nil {
		return h, nil, errkind.Unsupported.Wrap("decode request of kind %d", h.Kind)
	}
	if err := codec.Decode(rest, r); err != nil {
		return Header{}, nil, fmt.Errorf("decode request %s: %w", h.Kind, err)
	}
	return h, r, nil
}

// EncodeReply writes a reply. The body is left out, and may be nil, when r
// holds an error.
func EncodeReply(r *Reply, body codec.Message) []byte {
	p := codec.Encode(nil, r)
	if r.Err == errkind.OK && body != nil {
		p = codec.Encode(p, body)
	}
	return p
}

// EncodeError writes the reply that tells of err.
func EncodeError(err error, epoch ids.Epoch) []byte {
	return EncodeReply(&Reply{Err: errkind.Of(err), Text: err.Error(), Epoch: epoch}, nil)
}

// DecodeReply reads the reply to a request of kind k; byte strings alias p.
// The body is nil when the reply holds an error. err tells only of malformed
// bytes: see Reply.Failure for what the other side refused.
func DecodeReply(k Kind, p []byte) (Reply, codec.Message, error) {
	var r Reply
	rest, err := codec.DecodePrefix(p, &r)
	if err != nil {
		return Reply{}, nil, fmt.Errorf("decode reply to %s: %w", k, err)
	}
	if r.Err != errkind.OK {
		if len(rest) != 0 {
			return Reply{}, nil, fmt.Errorf("decode reply to %s: body behind an error: %w", k, codec.ErrCorrupt)
		}
		return r, nil, nil
	}
	body := NewReply(k)
	if body == nil {
		return r, nil, errkind.Unsupported.Wrap("decode reply to kind %d", k)
	}
	if err := codec.Decode(rest, body); err != nil {
		return Reply{}, nil, fmt.Errorf("decode reply to %s: %w", k, err)
	}
	return r, body, nil
}

// Failure returns the error that the reply holds, of its kind, or nil.
func (r *Reply) Failure() error {
	if r.Err == errkind.OK {
		return nil
	}
	return &Refusal{Kind: r.Err, Text: r.Text}
}

// Refusal is an error that the metadata service answered.
type Refusal struct {
	Kind errkind.Kind
	Text string
}

func (e *Refusal) Error() string {
	if e.Text == "" {
		return e.Kind.Error()
	}
	return e.Text
}

// Unwrap returns the kind.
func (e *Refusal) Unwrap() error { return e.Kind }

// String names the kind.
func (k Kind) String() string {
	if r := NewRequest(k); r != nil {
		return fmt.Sprintf("%T", r)[len("*api."):]
	}
	return fmt.Sprintf("kind %d", uint16(k))
}
