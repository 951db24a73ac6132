package client

import (
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
)

// slotOf names the slot whose records a request concerns first.
func slotOf(req api.Request) ids.Slot {
	switch m := req.(type) {
	case *api.Create:
		return m.Parent.Slot()
	case *api.Link:
		return m.Parent.Slot()
	case *api.Unlink:
		return m.Parent.Slot()
	case *api.Rename:
		return m.OldParent.Slot()
	case *api.Lookup:
		return m.Parent.Slot()
	case *api.Commit:
		return m.Ino.Slot()
	case *api.Open:
		return m.Ino.Slot()
	case *api.GetMap:
		return m.Ino.Slot()
	case *api.GetAttr:
		return m.Ino.Slot()
	case *api.ReadDir:
		return m.Ino.Slot()
	case *api.SetAttr:
		return m.Ino.Slot()
	case *api.Lock:
		return m.Ino.Slot()
	case *api.TestLock:
		return m.Ino.Slot()
	case *api.PlaceChunk:
		return m.Key.Block.Slot()
	}
	return slotOfAttrs(req)
}

func slotOfAttrs(req api.Request) ids.Slot {
	switch m := req.(type) {
	case *api.SetXattr:
		return m.Ino.Slot()
	case *api.RemoveXattr:
		return m.Ino.Slot()
	case *api.GetXattr:
		return m.Ino.Slot()
	case *api.ListXattr:
		return m.Ino.Slot()
	case *api.Readlink:
		return m.Ino.Slot()
	case *api.SetLayout:
		return m.Ino.Slot()
	case *api.GetLayout:
		return m.Ino.Slot()
	}
	return 0
}
