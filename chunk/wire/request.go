package wire

import (
	"time"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
)

// Request is one request as both ends see it.
type Request struct {
	Op    Op
	Class Class
	// Left is how long the sender will still wait; the server drops a request
	// whose time is up. Zero means no bound.
	Left time.Duration
	Body codec.Message
	// Payload goes out behind the body with one writev; at most MaxPayload
	// bytes in all. It must not change until the reply or the error arrives.
	Payload [][]byte
	// Dst receives the reply's payload when it is large enough; otherwise the
	// transport allocates.
	Dst []byte
}

// Response is one reply.
type Response struct {
	Status     errkind.Kind
	Text       string        // what failed, for people
	QueueDelay time.Duration // how long requests wait at this server now
	Body       codec.Message // of the type that Op has for replies; nil unless Status is OK (or Busy: a Grant with RetryAfter)
	Payload    []byte
}

// Err turns a failed response into an error, nil when OK.
func (r *Response) Err() error {
	if r.Status == errkind.OK {
		return nil
	}
	return r.Status.Wrap("%s", r.Text)
}
