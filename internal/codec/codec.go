// Package codec is the hand encoding of every durable record and wire message.
// One method of a type, Code(*Coder), both writes and reads it, so the two can
// never disagree. Encoding only reads the value, so a shared one may be encoded
// by several goroutines at once. Integers are little-endian and fixed, or unsigned varints
// where noted; byte strings are a varint length and the bytes.
package codec

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// ErrCorrupt is the kind of every decoding error.
var ErrCorrupt = errors.New("codec: malformed bytes")

// Message is a type that can be encoded and decoded.
type Message interface{ Code(c *Coder) }

// Coder writes to a buffer or reads from one. Errors stick: after the first,
// reads yield zeros. Not safe for concurrent use.
type Coder struct {
	buf     []byte
	off     int
	reading bool
	err     error
}

// Encode appends m's bytes to dst.
func Encode(dst []byte, m Message) []byte {
	c := Coder{buf: dst}
	m.Code(&c)
	return c.buf
}

// Decode reads m from p, which must hold exactly its bytes. Byte strings in m
// alias p.
func Decode(p []byte, m Message) error {
	c := Coder{buf: p, reading: true}
	m.Code(&c)
	if c.err == nil && c.off != len(p) {
		c.err = fmt.Errorf("%d bytes left over: %w", len(p)-c.off, ErrCorrupt)
	}
	return c.err
}

// DecodePrefix reads m from the start of p and returns what follows.
func DecodePrefix(p []byte, m Message) ([]byte, error) {
	c := Coder{buf: p, reading: true}
	m.Code(&c)
	if c.err != nil {
		return nil, c.err
	}
	return p[c.off:], nil
}

// Reading tells a Code method whether it decodes.
func (c *Coder) Reading() bool { return c.reading }

// Err returns the first error of a decode.
func (c *Coder) Err() error { return c.err }

// Fail makes the decode fail with a reason; ignored when encoding.
func (c *Coder) Fail(format string, args ...any) {
	if c.reading && c.err == nil {
		c.err = fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), ErrCorrupt)
	}
}

func (c *Coder) take(n int) []byte {
	if c.err != nil {
		return nil
	}
	if n < 0 || n > len(c.buf)-c.off {
		c.Fail("need %d bytes at offset %d, have %d", n, c.off, len(c.buf)-c.off)
		return nil
	}
	p := c.buf[c.off : c.off+n : c.off+n]
	c.off += n
	return p
}

// U8 codes one byte.
func (c *Coder) U8(v *uint8) {
	if !c.reading {
		c.buf = append(c.buf, *v)
	} else if p := c.take(1); p != nil {
		*v = p[0]
	} else {
		*v = 0
	}
}

// U8As codes any one-byte type.
func U8As[T ~uint8](c *Coder, v *T) {
	u := uint8(*v)
	c.U8(&u)
	if c.reading {
		*v = T(u)
	}
}

// U16 codes two bytes.
func (c *Coder) U16(v *uint16) {
	if !c.reading {
		c.buf = binary.LittleEndian.AppendUint16(c.buf, *v)
	} else if p := c.take(2); p != nil {
		*v = binary.LittleEndian.Uint16(p)
	} else {
		*v = 0
	}
}

// U32 codes four bytes.
func (c *Coder) U32(v *uint32) {
	if !c.reading {
		c.buf = binary.LittleEndian.AppendUint32(c.buf, *v)
	} else if p := c.take(4); p != nil {
		*v = binary.LittleEndian.Uint32(p)
	} else {
		*v = 0
	}
}

// U64 codes eight bytes.
func (c *Coder) U64(v *uint64) {
	if !c.reading {
		c.buf = binary.LittleEndian.AppendUint64(c.buf, *v)
	} else if p := c.take(8); p != nil {
		*v = binary.LittleEndian.Uint64(p)
	} else {
		*v = 0
	}
}

// I64 codes a signed number in eight bytes.
func (c *Coder) I64(v *int64) {
	u := uint64(*v)
	c.U64(&u)
	if c.reading {
		*v = int64(u)
	}
}

// Var codes an unsigned varint.
func (c *Coder) Var(v *uint64) {
	if !c.reading {
		c.buf = binary.AppendUvarint(c.buf, *v)
		return
	}
	*v = 0
	if c.err != nil {
		return
	}
	u, n := binary.Uvarint(c.buf[c.off:])
	if n <= 0 {
		c.Fail("bad varint at offset %d", c.off)
		return
	}
	c.off += n
	*v = u
}

// VarInt codes any unsigned integer type as a varint, refusing what does not fit.
func VarInt[T ~uint8 | ~uint16 | ~uint32 | ~uint64](c *Coder, v *T) {
	u := uint64(*v)
	c.Var(&u)
	if !c.reading {
		return
	}
	*v = T(u)
	if uint64(*v) != u {
		c.Fail("number %d is too large for its field", u)
	}
}

// Bool codes one byte, 0 or 1.
func (c *Coder) Bool(v *bool) {
	var b uint8
	if *v {
		b = 1
	}
	c.U8(&b)
	if !c.reading {
		return
	}
	if b > 1 {
		c.Fail("bool %d", b)
	}
	*v = b == 1
}

// Bytes codes a byte string; decoded ones alias the input. Empty decodes as nil.
func (c *Coder) Bytes(v *[]byte) {
	n := uint64(len(*v))
	c.Var(&n)
	if !c.reading {
		c.buf = append(c.buf, *v...)
		return
	}
	*v = nil
	if n == 0 {
		return
	}
	if n > uint64(len(c.buf)) {
		c.Fail("byte string of %d bytes", n)
		return
	}
	*v = c.take(int(n))
}

// String codes a string as Bytes does.
func (c *Coder) String(v *string) {
	if !c.reading {
		n := uint64(len(*v))
		c.Var(&n)
		c.buf = append(c.buf, *v...)
		return
	}
	var b []byte
	c.Bytes(&b)
	*v = string(b)
}

// Fixed codes exactly len(v) bytes in place.
func (c *Coder) Fixed(v []byte) {
	if !c.reading {
		c.buf = append(c.buf, v...)
		return
	}
	copy(v, c.take(len(v)))
}

// Slice codes a counted list. Every element takes at least one byte, so a
// forged count cannot make the decoder allocate more than the input explains.
func Slice[T any](c *Coder, v *[]T, elem func(*Coder, *T)) {
	n := uint64(len(*v))
	c.Var(&n)
	if c.reading {
		*v = nil
		if c.err != nil || n == 0 {
			return
		}
		if n > uint64(len(c.buf)-c.off) {
			c.Fail("list of %d elements in %d bytes", n, len(c.buf)-c.off)
			return
		}
		*v = make([]T, n)
	}
	for i := range *v {
		elem(c, &(*v)[i])
		if c.err != nil {
			return
		}
	}
}
