// Package daemon is what every long-running program of ckptfs shares: its log,
// its loopback admin endpoint (metrics and profiles), readiness and signals.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"os/signal"
	"syscall"
	"time"

	sdnotify "github.com/coreos/go-systemd/v22/daemon"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/pflag"
)

// Config is the part of a program's configuration that all daemons have.
type Config struct {
	LogLevel  string
	LogFormat string
	Admin     string
}

// AddFlags declares the flags of Config.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.LogLevel, "log-level", "info", "least severe `LEVEL` to log: debug, info, warn or error")
	fs.StringVar(&c.LogFormat, "log-format", "text", "`FORMAT` of the log on standard error: text or json")
	fs.StringVar(&c.Admin, "admin", "", "loopback `ADDR` for /metrics and /debug/pprof, as 127.0.0.1:9100; empty: none")
}

// Validate reports the first wrong field.
func (c *Config) Validate() error {
	var l slog.Level
	if err := l.UnmarshalText([]byte(c.LogLevel)); err != nil {
		return fmt.Errorf("--log-level %q: want debug, info, warn or error", c.LogLevel)
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		return fmt.Errorf("--log-format %q: want text or json", c.LogFormat)
	}
	if c.Admin == "" {
		return nil
	}
	host, _, err := net.SplitHostPort(c.Admin)
	if err != nil {
		return fmt.Errorf("--admin %q: want HOST:PORT: %w", c.Admin, err)
	}
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return fmt.Errorf("--admin %q: profiles and metrics are served on a loopback address only, as 127.0.0.1:9100", c.Admin)
	}
	return nil
}

// Logger builds the program's log. The configuration must be valid.
func (c *Config) Logger(w io.Writer) *slog.Logger {
	var l slog.Level
	_ = l.UnmarshalText([]byte(c.LogLevel)) // Validate has checked it
	o := &slog.HandlerOptions{Level: l}
	if c.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}

// Registry returns a metrics registry with the process's own metrics in it.
func Registry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// Signals returns a context that ends with SIGTERM or SIGINT.
func Signals(ctx context.Context) (context.Context, context.CancelFunc) {
	return signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT)
}

// Ready tells the service manager, if there is one, that the daemon serves.
func Ready() { _, _ = sdnotify.SdNotify(false, sdnotify.SdNotifyReady) }

// Stopping tells the service manager that the daemon drains.
func Stopping() { _, _ = sdnotify.SdNotify(false, sdnotify.SdNotifyStopping) }

// Admin serves metrics and profiles.
type Admin struct {
	Addr string // the real address, also when port 0 was asked for
	srv  *http.Server
	done chan struct{}
}

// StartAdmin listens on addr; it returns nil when addr is empty.
func StartAdmin(ctx context.Context, addr string, reg *prometheus.Registry, log *slog.Logger) (*Admin, error) {
	if addr == "" {
		return nil, nil
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("admin endpoint: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{Registry: reg}))
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	a := &Admin{Addr: l.Addr().String(), srv: &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}, done: make(chan struct{})}
	go func() {
		defer close(a.done)
		if err := a.srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("admin endpoint ended", "err", err)
		}
	}()
	log.Info("admin endpoint", "addr", a.Addr)
	return a, nil
}

// Close ends the endpoint.
func (a *Admin) Close() {
	if a == nil {
		return
	}
	_ = a.srv.Close()
	<-a.done
}
