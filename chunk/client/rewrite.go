package client

import (
	"context"

	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// rewrite reads back a block that has only K chunks, or fewer than a quorum,
// and writes its bytes under new ids (rule 10): several when the layout that
// can be had now is so narrow that one block does not hold them.
func (w *writer) rewrite(ctx context.Context, old ids.Block) (ids.Block, error) {
	w.c.log.Info("block rewritten", "block", old.ID.String(), "length", old.Length)
	inner, err := w.copyBlocks(ctx, &old)
	w.mu.Lock()
	w.end(errkind.Unavailable.Wrap("block %s was rewritten", old.ID))
	w.mu.inner = inner
	w.unlock()
	if err != nil {
		for _, in := range inner {
			in.Abandon()
		}
		return ids.Block{}, err
	}
	return inner[0].sealedBlock(), nil
}

func (w *writer) copyBlocks(ctx context.Context, old *ids.Block) ([]*writer, error) {
	if w.depth >= maxRewrites {
		return nil, errkind.Unavailable.Wrap("block %s: given up after it was rewritten %d times", old.ID, w.depth)
	}
	var all []*writer
	empty := 0
	for off := 0; off < int(old.Length); {
		spec := w.spec
		spec.FileOff += uint64(off)
		spec.MaxLen = 0
		in, err := w.c.newWriter(ctx, spec)
		if err != nil {
			return all, err
		}
		in.depth = w.depth + 1
		all = append(all, in)
		n, err := w.fill(ctx, in, old, off)
		if err != nil {
			return all, err
		}
		if n > 0 {
			off += n
			all = append(all[:len(all)-1], in.parts()...)
			continue
		}
		all = all[:len(all)-1]
		if empty++; empty > maxRewrites {
			return all, errkind.Unavailable.Wrap("block %s: rewriting it makes no progress", old.ID)
		}
	}
	return all, nil
}

// parts are the writers that hold a sealed writer's bytes: itself, or those
// that replaced it.
func (w *writer) parts() []*writer {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.mu.inner) > 0 {
		return w.mu.inner
	}
	return []*writer{w}
}

// fill copies as much of old, from off on, as goes into one block, seals it,
// and returns how many bytes it holds.
func (w *writer) fill(ctx context.Context, in *writer, old *ids.Block, off int) (int, error) {
	end := min(int(old.Length), off+in.maxLen)
	for at := off; at < end; {
		n := min(in.l.StripeData(), end-at)
		buf := w.c.buffer(n)
		if err := w.c.readBlock(ctx, old, at, buf.p, wire.ClassForeground); err != nil {
			w.c.free(buf)
			return 0, err
		}
		if err := in.Append(ctx, buf.p, func(bool) { w.c.free(buf) }); err != nil {
			break // Seal tells what is in the block
		}
		at += n
	}
	b, err := in.Seal(ctx)
	if err != nil {
		return 0, err
	}
	n := int(b.Length)
	for _, more := range in.Spill() {
		n += int(more.Length)
	}
	return n, nil
}
