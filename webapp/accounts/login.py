"""Logging in: Django's own view behind the limit of guesses."""

from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.views import LoginView
from django.http import HttpRequest, HttpResponse

from webapp.accounts.guesses import tries_forgive, try_begin
from webapp.accounts.models import LoginTry
from webapp.accounts.session_signals import address_of
from webapp.core.problems import BusyProblem


class GuardedLogin(LoginView):
    """The log-in page; whoever tried too often is told how long to wait."""

    tried: LoginTry

    def post(self, request: HttpRequest, *args: str, **kwargs: object) -> HttpResponse:
        """Count the try, then look at the password."""
        try:
            self.tried = try_begin(
                name=request.POST.get("username", ""), address=address_of(request)
            )
        except BusyProblem as problem:
            return self._wait(problem)
        return super().post(request, *args, **kwargs)

    def get_form(self, form_class: type[AuthenticationForm] | None = None) -> AuthenticationForm:
        """Return the form; whoever is known already begins with the password."""
        form = super().get_form(form_class)
        if self.request.user.is_authenticated:
            form.fields["username"].widget.attrs.pop("autofocus", None)
            form.fields["password"].widget.attrs["autofocus"] = True
        return form

    def form_valid(self, form: AuthenticationForm) -> HttpResponse:
        """Let the person in."""
        tries_forgive(self.tried)
        return super().form_valid(form)

    def _wait(self, problem: BusyProblem) -> HttpResponse:
        form = self.get_form_class()(self.request)
        context = self.get_context_data(form=form, wait=problem.detail)
        response = self.render_to_response(context, status=problem.status)
        response["Retry-After"] = str(problem.facts["retry_after_seconds"])
        return response
