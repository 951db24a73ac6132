package client

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/meta/api"
	"github.com/ckptfs/ckptfs/meta/stream"
)

// lateAnswer has a GetAttr answered, with an old value, after between ran, and
// returns what a GetAttr after that tells. The service says 2 from then on.
func lateAnswer(t *testing.T, between func(s *script, c *Client)) (mtime int64) {
	t.Helper()
	tell := func(v int64) *api.Entry { return &api.Entry{Attr: api.Attr{Ino: 9, Mtime: v}} }
	scripted(t, func(s *script, c *Client) {
		s.lease = 900
		require.NoError(t, c.Do(bg, &api.GetAttr{Ino: 8}, &api.Entry{})) // asks for the lease
		s.Sleep(10 * time.Millisecond)
		s.answer = func(_ uint64, _ *api.Header, req api.Request) codec.Message {
			if _, ok := req.(*api.GetAttr); ok {
				return nil
			}
			return tell(2)
		}
		s.Go("reader", func() { require.NoError(t, c.Do(bg, &api.GetAttr{Ino: 9}, &api.Entry{})) })
		s.Sleep(time.Millisecond)
		late := s.held[0]
		between(s, c)
		s.answer = func(uint64, *api.Header, api.Request) codec.Message { return tell(2) }
		s.send(s.conn, late, tell(1))
		s.Sleep(time.Millisecond)
		var e api.Entry
		require.NoError(t, c.Do(bg, &api.GetAttr{Ino: 9}, &e))
		mtime = e.Attr.Mtime
	})
	return mtime
}

func TestLateAnswerIsNotKept(t *testing.T) {
	require.EqualValues(t, 1, lateAnswer(t, func(*script, *Client) {}), "without a change it is kept")
	require.EqualValues(t, 2, lateAnswer(t, func(_ *script, c *Client) {
		require.NoError(t, c.Do(bg, &api.SetXattr{Ino: ids.Ino(9)}, nil))
	}), "a change of our own")
	require.EqualValues(t, 2, lateAnswer(t, func(_ *script, c *Client) {
		require.NoError(t, c.Do(bg, &api.Rename{}, nil))
	}), "a change of anything")
	require.EqualValues(t, 2, lateAnswer(t, func(s *script, c *Client) {
		_ = s.conn.Send(stream.Append(nil, stream.TypePush, uint64(api.PushRecall), codec.Encode(nil, &api.Pushed{})))
		s.Sleep(1500 * time.Millisecond)
		answer := s.answer
		s.answer = func(uint64, *api.Header, api.Request) codec.Message { return &api.Entry{} }
		require.NoError(t, c.Do(bg, &api.GetAttr{Ino: 8}, nil)) // asks again
		s.answer = answer
		s.Sleep(time.Millisecond)
		require.Greater(t, c.mu.lease.until, s.Now())
	}), "a lease that came after the question")
}
