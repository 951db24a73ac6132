package wire

import (
	"fmt"
	"io"
)

// readAhead is the whole read buffer of a connection, in bytes: enough for a
// header and a usual body in one system call.
const readAhead = 4 << 10

// Reader takes frames off a connection. Payloads go straight to where they
// belong; only what came along with a header is copied. Not safe for
// concurrent use. A read that failed with a time-out before anything of the
// frame was handed out can be repeated.
type Reader struct {
	src  io.Reader
	buf  []byte // unread bytes are buf[off:end]
	body []byte
	off  int
	end  int
}

// NewReader returns a reader of frames from src.
func NewReader(src io.Reader) *Reader {
	return &Reader{src: src, buf: make([]byte, readAhead)}
}

// Partial reports whether bytes of an unfinished frame are in the buffer.
func (r *Reader) Partial() bool { return r.off < r.end }

// fill reads until n bytes are in the buffer; n ≤ readAhead.
func (r *Reader) fill(n int) error {
	if r.end-r.off >= n {
		return nil
	}
	if r.off > 0 {
		r.end = copy(r.buf, r.buf[r.off:r.end])
		r.off = 0
	}
	for r.end < n {
		m, err := r.src.Read(r.buf[r.end:])
		r.end += m
		if err != nil && r.end < n {
			if err == io.EOF && r.end > 0 {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
	}
	return nil
}

// Header reads the next header. io.EOF means that the peer closed the
// connection between two frames.
func (r *Reader) Header() (Header, error) {
	if err := r.fill(HeaderSize); err != nil {
		return Header{}, err
	}
	h, err := ParseHeader(r.buf[r.off : r.off+HeaderSize])
	if err == nil {
		r.off += HeaderSize
	}
	return h, err
}

// Body reads the frame's body. The slice is good until the next call.
func (r *Reader) Body(h *Header) ([]byte, error) {
	n := int(h.BodyLen)
	if n <= readAhead {
		if err := r.fill(n); err != nil {
			return nil, cut(err)
		}
		r.off += n
		return r.buf[r.off-n : r.off : r.off], nil
	}
	r.body = make([]byte, n)
	return r.body, r.Payload(r.body)
}

// Payload fills dst with the next bytes of the connection.
func (r *Reader) Payload(dst []byte) error {
	n := copy(dst, r.buf[r.off:r.end])
	r.off += n
	if n == len(dst) {
		return nil
	}
	_, err := io.ReadFull(r.src, dst[n:])
	return cut(err)
}

// Discard drops the next n bytes of the connection.
func (r *Reader) Discard(n int) error {
	for n > 0 {
		if r.off == r.end {
			r.off, r.end = 0, 0
			if err := r.fill(1); err != nil {
				return cut(err)
			}
		}
		k := min(n, r.end-r.off)
		r.off += k
		n -= k
	}
	return nil
}

// cut explains an end of the stream inside a frame.
func cut(err error) error {
	if err == io.EOF || err == io.ErrUnexpectedEOF { //nolint:errorlint // returned bare by io.ReadFull
		return fmt.Errorf("the connection ended inside a frame: %w", io.ErrUnexpectedEOF)
	}
	return err
}
