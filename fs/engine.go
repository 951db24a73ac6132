package fs

import (
	"context"

	"github.com/ckptfs/ckptfs/fs/file"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// FileEngine makes e usable as an Engine.
func FileEngine(e *file.Engine) Engine { return fileEngine{e} }

type fileEngine struct{ *file.Engine }

func (e fileEngine) Open(ctx context.Context, ino ids.Ino, fl file.OpenFlags) (File, Opened, error) {
	h, err := e.Engine.Open(ctx, ino, fl)
	if err != nil {
		return nil, Opened{}, err
	}
	return h, Opened{Attr: h.Attr(), KeepCache: h.KeepCache()}, nil
}

func (e fileEngine) OpenCreated(attr api.Attr, fl file.OpenFlags) File {
	return e.Engine.OpenCreated(attr, fl)
}

func (e fileEngine) CopyRange(ctx context.Context, dst File, dstOff int64, src File, srcOff, n int64) (int64, error) {
	d, ok := dst.(*file.Handle)
	s, ok2 := src.(*file.Handle)
	if !ok || !ok2 {
		return 0, errkind.CrossDevice.Wrap("copy between different engines")
	}
	return e.Engine.CopyRange(ctx, d, dstOff, s, srcOff, n)
}
