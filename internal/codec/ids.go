package codec

import "github.com/ckptfs/ckptfs/internal/ids"

// BlockID codes 16 big-endian bytes.
func (c *Coder) BlockID(v *ids.BlockID) {
	if !c.reading {
		c.buf = v.Append(c.buf)
		return
	}
	*v = ids.BlockID{}
	if p := c.take(16); p != nil {
		*v = ids.BlockIDFrom(p)
	}
}

// UUID codes 16 bytes.
func (c *Coder) UUID(v *ids.UUID) { c.Fixed(v[:]) }

// Layout codes four bytes. A zero layout is legal ("none"); any other must be valid.
func (c *Coder) Layout(v *ids.Layout) {
	U8As(c, &v.Kind)
	c.U8(&v.K)
	c.U8(&v.M)
	c.U8(&v.CellLog)
	if c.reading && c.err == nil && *v != (ids.Layout{}) {
		if err := v.Validate(); err != nil {
			c.Fail("%v", err)
		}
	}
}

// Block codes a block's description.
func (c *Coder) Block(v *ids.Block) {
	c.BlockID(&v.ID)
	c.Layout(&v.Layout)
	c.U32(&v.Length)
	c.U32(&v.Logical)
	U8As(c, &v.Codec)
	Slice(c, &v.Frames, func(c *Coder, f *ids.Frame) {
		c.U32(&f.Logical)
		c.U32(&f.Stored)
		c.U64(&f.Sum)
	})
	c.U8(&v.Granule)
	Slice(c, &v.Disks, func(c *Coder, d *ids.DiskID) { VarInt(c, d) })
	Slice(c, &v.Digests, func(c *Coder, d *uint64) { c.U64(d) })
	VarInt(c, &v.Version)
	if c.reading && c.err == nil && (len(v.Disks) != v.Layout.Width() || len(v.Digests) != v.Layout.Width()) {
		c.Fail("block %s: %d disks and %d digests for %s", v.ID, len(v.Disks), len(v.Digests), v.Layout)
	}
}

// Extent codes one extent.
func (c *Coder) Extent(v *ids.Extent) {
	VarInt(c, &v.Off)
	VarInt(c, &v.Len)
	U8As(c, &v.Kind)
	switch v.Kind {
	case ids.ExtentBlock:
		c.BlockID(&v.Block)
		VarInt(c, &v.BlockOff)
	case ids.ExtentInline:
		c.Bytes(&v.Data)
		if c.reading && c.err == nil && uint64(len(v.Data)) != v.Len {
			c.Fail("inline extent of %d bytes holds %d", v.Len, len(v.Data))
		}
	default:
		c.Fail("extent kind %d", v.Kind)
	}
	if v.Off+v.Len < v.Off {
		c.Fail("extent %d+%d overflows", v.Off, v.Len)
	}
}
