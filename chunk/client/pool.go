package client

import (
	"math/bits"
	"sync"
)

// buffer is a pooled piece of memory. Large ones are page-aligned.
type buffer struct {
	p     []byte
	class int
}

// Sizes of pooled buffers, log2 of bytes.
const (
	minBufferLog = 12
	maxBufferLog = 23 // a stripe
)

var buffers [maxBufferLog + 1]sync.Pool

// buffer returns n bytes of undefined content; n at most 8 MiB.
func (c *Client) buffer(n int) *buffer {
	class := max(minBufferLog, bits.Len(uint(max(n, 1)-1)))
	if b, ok := buffers[class].Get().(*buffer); ok {
		b.p = b.p[:n]
		return b
	}
	return &buffer{p: make([]byte, n, 1<<class), class: class}
}

// free gives a buffer back; nothing may refer to it any more.
func (c *Client) free(b *buffer) {
	if b == nil {
		return
	}
	b.p = b.p[:cap(b.p)]
	if c.onFree != nil {
		c.onFree(b.p)
	}
	buffers[b.class].Put(b)
}
